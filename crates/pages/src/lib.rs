//! What the pager reads that others wrote: indexes and maps of layers, and requests. Without I/O, so that it can be fuzzed.
#![forbid(unsafe_code)]

pub mod format;
pub mod wire;
