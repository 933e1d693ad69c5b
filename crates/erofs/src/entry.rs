//! What the writer is given, and how it refuses.

use serde::Deserialize;

/// What a path is. The numbers are the wire form of the binding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "u8")]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A Unix socket's name.
    Socket,
    /// A character device; 0/0 is a whiteout of overlayfs.
    Char,
    /// A block device.
    Block,
}

impl TryFrom<u8> for Kind {
    type Error = String;

    fn try_from(number: u8) -> Result<Self, String> {
        Ok(match number {
            0 => Self::File,
            1 => Self::Dir,
            2 => Self::Symlink,
            3 => Self::Fifo,
            4 => Self::Socket,
            5 => Self::Char,
            6 => Self::Block,
            _ => return Err(format!("no kind has number {number}")),
        })
    }
}

impl Kind {
    /// The type bits of `st_mode`.
    pub(crate) fn mode_bits(self) -> u16 {
        match self {
            Self::Fifo => 0o010_000,
            Self::Char => 0o020_000,
            Self::Dir => 0o040_000,
            Self::Block => 0o060_000,
            Self::File => 0o100_000,
            Self::Symlink => 0o120_000,
            Self::Socket => 0o140_000,
        }
    }

    /// The type in a directory entry (`EROFS_FT_*`).
    pub(crate) fn dirent_type(self) -> u8 {
        match self {
            Self::File => 1,
            Self::Dir => 2,
            Self::Char => 3,
            Self::Block => 4,
            Self::Fifo => 5,
            Self::Socket => 6,
            Self::Symlink => 7,
        }
    }
}

/// An extended attribute: its full name ("user.x") and value.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Xattr {
    /// Name with its namespace.
    #[serde(with = "serde_bytes")]
    pub name: Vec<u8>,
    /// Value, at most 65,535 bytes.
    #[serde(with = "serde_bytes")]
    pub value: Vec<u8>,
}

/// One path of the tree. On the wire of the binding it is an array in this order.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Entry {
    /// Path below the root, without leading or trailing slash; empty for the root itself.
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    /// What it is.
    pub kind: Kind,
    /// Permission bits with set-uid, set-gid and sticky: at most 0o7777.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Time of last change, whole seconds since 1970, negative before.
    pub mtime: i64,
    /// Nanoseconds to add, 0..=999,999,999.
    pub mtime_ns: u32,
    /// Device numbers (major 12 bits, minor 20 bits) of a char or block device.
    pub rdev: (u32, u32),
    /// What a symbolic link holds, 1..=4095 bytes.
    #[serde(with = "serde_bytes")]
    pub target: Vec<u8>,
    /// Extended attributes; names unique.
    pub xattrs: Vec<Xattr>,
    /// Hard-link group: entries of one non-zero group are one inode, whose attributes are those of the first in the list.
    pub group: u64,
    /// Where a file's bytes begin in the data blob: a multiple of the block size.
    pub offset: u64,
    /// A file's size in bytes.
    pub size: u64,
}

/// Why a tree cannot be written.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The path cannot stand in an image: empty, dot or over-long component, NUL, or a slash too many.
    #[error("{0:?}: not a path of an image")]
    Path(String),
    /// Two entries have this path.
    #[error("{0:?}: listed twice")]
    Duplicate(String),
    /// No directory was given for the path's parent (or for the root).
    #[error("{0:?}: its parent directory is not listed")]
    NoParent(String),
    /// A value does not fit the format.
    #[error("{0:?}: {1}")]
    Value(String, &'static str),
    /// The layer is too large for 32-bit block addresses.
    #[error("layer too large: {0} blocks of 4 KiB, the format ends at 4294967295 (16 TiB)")]
    TooLarge(u64),
}

impl Entry {
    pub(crate) fn shown(&self) -> String {
        String::from_utf8_lossy(&self.path).into_owned()
    }

    /// Checks all that does not depend on other entries.
    pub(crate) fn check(&self, data_blocks: u64) -> Result<(), Error> {
        let refuse = |why| Err(Error::Value(self.shown(), why));
        if self.mode > 0o7777 {
            return refuse("mode has bits beyond 07777");
        }
        if self.mtime_ns >= 1_000_000_000 {
            return refuse("nanoseconds of a second or more");
        }
        match self.kind {
            Kind::Symlink if self.target.is_empty() || self.target.len() > 4095 || self.target.contains(&0) => {
                refuse("symlink target empty, over 4095 bytes or with a NUL")
            }
            Kind::Char | Kind::Block if self.rdev.0 >= 1 << 12 || self.rdev.1 >= 1 << 20 => {
                refuse("device number beyond 12 bits major or 20 bits minor")
            }
            Kind::Dir if self.group != 0 => refuse("a directory cannot be hard-linked"),
            Kind::File if self.size > 0 => {
                let end = self.offset.checked_add(self.size).map(|e| e.div_ceil(crate::BLOCK));
                if !self.offset.is_multiple_of(crate::BLOCK) {
                    refuse("data not at a block boundary")
                } else if end.is_none_or(|e| e > data_blocks) {
                    refuse("data beyond the end of the data blob")
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }
}
