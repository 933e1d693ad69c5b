//! System calls with owned descriptors and named errors: the only crate of the workspace that may say `unsafe`.

mod error;
mod mount;

pub use error::{Error, Result};
pub use mount::*;
