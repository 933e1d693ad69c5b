//! System calls with owned descriptors and named errors: the only crate of the workspace that may say `unsafe`.

mod cache;
mod child;
mod child_init;
mod child_socket;
mod error;
mod mount;

pub use cache::cached_bytes;
pub use child::{launch, Entry, Launch, Report, Stage, Streams, REPORT};
pub use child_init::*;
pub use child_socket::receive_descriptor;
pub use error::{Error, Result};
pub use mount::*;
