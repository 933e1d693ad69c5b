//! The protocol between an edge and aether: frames and messages, no I/O.
#![forbid(unsafe_code)]

#[rustfmt::skip]
mod messages;

pub use messages::*;
