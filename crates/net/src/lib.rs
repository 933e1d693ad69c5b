//! The network of sandboxes, as far as the kernel needs more than text: links and routes by netlink, programs and maps of BPF.
//! It knows slots and policies no more than the kernel does; src/dsec/kernel/network.py says what they mean.
#![forbid(unsafe_code)]

mod hook;
mod links;
mod program;
mod route;

pub use hook::Hook;
pub use links::{Ends, Links};
pub use program::run;
