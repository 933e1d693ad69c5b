//! System calls with owned descriptors and named errors: the only crate of the workspace that may say `unsafe`.

mod cache;
mod error;
mod mount;

pub use cache::cached_bytes;
pub use error::{Error, Result};
pub use mount::*;
