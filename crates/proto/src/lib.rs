//! The protocol between an edge and aether: frames and messages, no I/O.
#![forbid(unsafe_code)]

mod frame;
#[rustfmt::skip]
mod messages;

pub use frame::*;
pub use messages::*;
