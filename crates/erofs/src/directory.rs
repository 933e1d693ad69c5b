//! Directory contents: blocks of 12-byte entries followed by their names, sorted by name over the whole directory.

use crate::BLOCK;

const DIRENT: usize = 12;

/// One name of a directory: what it is called, its inode's index and its type.
pub(crate) struct Name<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) inode: usize,
    pub(crate) kind: u8,
}

/// How the names of a directory fall into blocks: index one past the last name of each block, and bytes of the last block.
pub(crate) struct Shape {
    pub(crate) ends: Vec<usize>,
    pub(crate) last: usize,
}

impl Shape {
    /// Bytes of the directory.
    pub(crate) fn size(&self) -> u64 {
        (self.ends.len() as u64 - 1) * BLOCK + self.last as u64
    }
}

/// Packs `names` (sorted, with "." and "..", so never none) into as few blocks as their order allows.
pub(crate) fn shape(names: &[Name<'_>]) -> Shape {
    let mut ends = Vec::new();
    let mut used = 0;
    for (index, name) in names.iter().enumerate() {
        let need = DIRENT + name.name.len();
        if used + need > BLOCK as usize {
            ends.push(index);
            used = 0;
        }
        used += need;
    }
    ends.push(names.len());
    Shape { ends, last: used }
}

/// The directory's bytes; `nid` gives an inode's number.
pub(crate) fn content(names: &[Name<'_>], shape: &Shape, nid: impl Fn(usize) -> u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(shape.ends.len() * BLOCK as usize);
    let mut start = 0;
    for &end in &shape.ends {
        out.resize(out.len().next_multiple_of(BLOCK as usize), 0);
        let block = &names[start..end];
        let mut name_offset = block.len() * DIRENT;
        for name in block {
            out.extend_from_slice(&nid(name.inode).to_le_bytes());
            out.extend_from_slice(&(name_offset as u16).to_le_bytes());
            out.extend_from_slice(&[name.kind, 0]);
            name_offset += name.name.len();
        }
        for name in block {
            out.extend_from_slice(name.name);
        }
        start = end;
    }
    out
}
