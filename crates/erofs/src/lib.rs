//! EROFS metadata images, made from a list of entries: no I/O, no clock, the same bytes for the same entries.
//!
//! The form is the plain one: 4 KiB blocks, extended (64-byte) inodes, regular files chunk-based in one extra device (the
//! data blob), directories and symlinks inside the image. Source of the layout: `fs/erofs/erofs_fs.h` of Linux 6.18.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod directory;
mod entry;
mod image;
mod layout;
mod tree;
mod xattr;

pub use entry::{Entry, Error, Kind, Xattr};
pub use image::{build, Options};

/// Bytes of a block, of metadata and of data alike.
pub const BLOCK: u64 = 4096;
/// Largest number of blocks that a device of the plain (32-bit) form can address: 16 TiB less one block.
pub const MAX_BLOCKS: u64 = u32::MAX as u64;
