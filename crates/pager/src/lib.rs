//! The parts of `dsec-pager`. Formats and messages are without I/O, so that they can be fuzzed.
#![forbid(unsafe_code)]

mod bits;
pub mod control;
mod desk;
mod engine;
mod fetch;
mod files;
pub mod format;
mod fuse;
mod gauge;
mod layer;
pub mod questions;
mod shared;
mod source;
mod store;
pub mod wire;

pub use desk::Desk;
pub use engine::Engine;
pub use shared::{Asker, Cell, Shared};
