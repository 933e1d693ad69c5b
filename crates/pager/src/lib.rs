//! The parts of `dsec-pager`.
#![forbid(unsafe_code)]

mod bits;
pub mod control;
mod desk;
mod engine;
mod fetch;
mod files;
mod fuse;
mod gauge;
mod layer;
pub mod questions;
mod shared;
mod source;
mod store;

pub use desk::Desk;
pub use engine::Engine;
pub use shared::{Asker, Cell, Shared};
