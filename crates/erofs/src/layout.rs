//! Where everything goes: a position for every inode, blocks for what is not inline.

use crate::directory::{self, Name, Shape};
use crate::entry::{Error, Kind};
use crate::tree::Node;
use crate::{xattr, BLOCK};

/// Bytes of an extended inode.
pub(crate) const INODE: u64 = 64;
/// Inodes begin at multiples of this; an inode's number is its position divided by it.
pub(crate) const SLOT: u64 = 32;
/// Bytes of a chunk index.
pub(crate) const INDEX: u64 = 8;
/// The largest chunk that the format can name: 2^31 blocks.
const MAX_CHUNK_BITS: u32 = 31;

/// How an inode's own data is kept.
pub(crate) enum Data {
    /// Nothing: an empty file, a device, a pipe, a socket.
    None,
    /// A file in the data blob: log2 of blocks a chunk, and how many chunks.
    Chunks { bits: u32, count: u64 },
    /// A symlink's target, behind the inode or in a block of its own.
    Target { inline: bool },
    /// A directory: its names by block; the last block is behind the inode if `inline`.
    Names { shape: Shape, inline: bool },
}

/// An inode's place. `blocks`: index of its first own block behind all inodes, meaningful if it has any.
pub(crate) struct Place {
    pub(crate) position: u64,
    pub(crate) xattrs: Vec<u8>,
    pub(crate) data: Data,
    pub(crate) blocks: u64,
}

impl Place {
    /// Bytes of the inode and its extended attributes.
    pub(crate) fn head(&self) -> u64 {
        INODE + self.xattrs.len() as u64
    }
}

/// All places, how many blocks the inodes take, and how many follow them.
pub(crate) struct Layout {
    pub(crate) places: Vec<Place>,
    pub(crate) inode_blocks: u64,
    pub(crate) own_blocks: u64,
}

/// The names of directory `number`, with "." and "..", in order.
pub(crate) fn names<'a>(nodes: &[Node<'a>], number: usize) -> Vec<Name<'a>> {
    let node = &nodes[number];
    let mut out: Vec<Name<'a>> = Vec::with_capacity(node.children.len() + 2);
    out.push(Name {
        name: b".",
        inode: number,
        kind: 2,
    });
    out.push(Name {
        name: b"..",
        inode: node.parent,
        kind: 2,
    });
    let child = |&(name, inode): &(&'a [u8], usize)| Name {
        name,
        inode,
        kind: nodes[inode].entry.kind.dirent_type(),
    };
    out.extend(node.children.iter().map(child));
    out.sort_by(|a, b| a.name.cmp(b.name));
    out
}

fn chunks(size: u64) -> Data {
    let blocks = size.div_ceil(BLOCK);
    let bits = blocks.next_power_of_two().trailing_zeros().min(MAX_CHUNK_BITS);
    Data::Chunks {
        bits,
        count: blocks.div_ceil(1 << bits),
    }
}

/// The data of an inode, the bytes that follow it, and how many blocks of its own it needs.
fn data(nodes: &[Node<'_>], number: usize, head: u64) -> (Data, u64, u64) {
    let entry = nodes[number].entry;
    match entry.kind {
        Kind::File if entry.size > 0 => {
            let data = chunks(entry.size);
            let Data::Chunks { count, .. } = &data else {
                return (data, 0, 0);
            };
            let tail = count * INDEX + head.next_multiple_of(INDEX) - head;
            (data, tail, 0)
        }
        Kind::Symlink => {
            let length = entry.target.len() as u64;
            // The kernel's short path wants inode, attributes and target in one block.
            let inline = head + length <= BLOCK;
            (
                Data::Target { inline },
                if inline { length } else { 0 },
                u64::from(!inline),
            )
        }
        Kind::Dir => {
            let shape = directory::shape(&names(nodes, number));
            let inline = head + shape.last as u64 <= BLOCK;
            let blocks = shape.ends.len() as u64 - u64::from(inline);
            let tail = if inline { shape.last as u64 } else { 0 };
            (Data::Names { shape, inline }, tail, blocks)
        }
        _ => (Data::None, 0, 0),
    }
}

/// Lays out all inodes from byte `start` on.
pub(crate) fn lay_out(nodes: &[Node<'_>], start: u64) -> Result<Layout, Error> {
    let mut places = Vec::with_capacity(nodes.len());
    let mut cursor = start.next_multiple_of(SLOT);
    let mut own_blocks = 0;
    for (number, node) in nodes.iter().enumerate() {
        let xattrs = xattr::body(node.entry)?;
        let head = INODE + xattrs.len() as u64;
        let (data, tail, blocks) = data(nodes, number, head);
        let one_block =
            matches!(data, Data::Target { inline: true } | Data::Names { inline: true, .. }) || head <= BLOCK;
        // Inline data must not cross a block; keeping a small inode in one block too saves the reader a second page.
        let whole = if matches!(data, Data::Chunks { .. }) {
            head
        } else {
            head + tail
        };
        if one_block && cursor % BLOCK + whole > BLOCK {
            cursor = cursor.next_multiple_of(BLOCK);
        }
        places.push(Place {
            position: cursor,
            xattrs,
            data,
            blocks: own_blocks,
        });
        cursor = (cursor + head + tail).next_multiple_of(SLOT);
        own_blocks += blocks;
    }
    Ok(Layout {
        places,
        inode_blocks: cursor.div_ceil(BLOCK),
        own_blocks,
    })
}
