//! The files that say what a layer's data is made of (`index`) and where its chunks lie in a store (`map`). Little endian.

use std::ops::Range;

use sha2::{Digest, Sha256};
use thiserror::Error;

pub const BLOCK: u64 = 4096;
/// Entries of the index that are hashed together.
pub const PAGE_ENTRIES: u64 = 1024;
pub const HEAD: usize = 64;
pub const INDEX_ENTRY: usize = 36;
pub const MAP_ENTRY: usize = 16;
pub const PACK_NAME: usize = 32;
pub const MAX_CHUNK: u32 = 256 * 1024;
/// The most that a chunk takes in a pack: a zstd frame of what does not compress is a little longer than it.
pub const MAX_STORED: u32 = MAX_CHUNK + 1024;
pub const MAX_PACK: u64 = 64 * 1024 * 1024;
/// 16 TiB of data in chunks of one block.
pub const MAX_CHUNKS: u64 = 1 << 32;
/// The pack number of a chunk of zeros.
pub const ZEROS: u32 = u32::MAX;

pub type Hash = [u8; 32];

/// Why a file is no index or map.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FormatError {
    #[error("the {0} is cut short")]
    Short(&'static str),
    #[error("the {0} does not begin as one")]
    Magic(&'static str),
    #[error("the {file} says {what} = {value}, which cannot be")]
    Value {
        file: &'static str,
        what: &'static str,
        value: u64,
    },
    #[error("the index is not the one that the manifest names")]
    Root,
}

fn value(file: &'static str, what: &'static str, value: u64) -> FormatError {
    FormatError::Value { file, what, value }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes
        .get(at..at + 8)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

#[must_use]
pub fn sha256(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

/// The head of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexHead {
    pub chunks: u64,
    pub data_bytes: u64,
}

impl IndexHead {
    /// # Errors
    /// What is wrong with the head, or with a file of `file_bytes` that has it.
    pub fn parse(head: &[u8; HEAD], file_bytes: u64) -> Result<Self, FormatError> {
        if &head[..8] != b"DSECIDX2" {
            return Err(FormatError::Magic("index"));
        }
        for (what, at, wanted) in [("block_bytes", 8, BLOCK), ("page_entries", 12, PAGE_ENTRIES)] {
            let found = u64::from(u32_at(head, at));
            if found != wanted {
                return Err(value("index", what, found));
            }
        }
        let (chunks, data_bytes) = (u64_at(head, 16), u64_at(head, 24));
        if chunks > MAX_CHUNKS {
            return Err(value("index", "chunks", chunks));
        }
        if data_bytes % BLOCK != 0 || data_bytes / BLOCK > MAX_CHUNKS {
            return Err(value("index", "data_bytes", data_bytes));
        }
        if file_bytes != HEAD as u64 + chunks * INDEX_ENTRY as u64 {
            return Err(FormatError::Short("index"));
        }
        Ok(Self { chunks, data_bytes })
    }
}

/// Takes an index in, page by page: checks it and learns where each chunk begins.
pub struct IndexReader {
    head: IndexHead,
    root: Sha256,
    starts: Vec<u32>,
    block: u64,
}

impl IndexReader {
    /// # Errors
    /// As `IndexHead::parse`.
    pub fn new(head: &[u8; HEAD], file_bytes: u64) -> Result<Self, FormatError> {
        let parsed = IndexHead::parse(head, file_bytes)?;
        Ok(Self {
            head: parsed,
            root: Sha256::new_with_prefix(head),
            starts: Vec::with_capacity(parsed.chunks as usize),
            block: 0,
        })
    }

    /// The next page: 1024 entries, or what is left of them.
    ///
    /// # Errors
    /// A length of 0, above 256 KiB or beyond the data's end.
    pub fn page(&mut self, page: &[u8]) -> Result<(), FormatError> {
        self.root.update(sha256(page));
        for entry in page.chunks_exact(INDEX_ENTRY) {
            let blocks = u64::from(u32_at(entry, 0));
            if blocks == 0 || blocks * BLOCK > u64::from(MAX_CHUNK) {
                return Err(value("index", "blocks of a chunk", blocks));
            }
            let start = u32::try_from(self.block).map_err(|_| value("index", "block", self.block))?;
            self.starts.push(start);
            self.block += blocks;
        }
        Ok(())
    }

    /// # Errors
    /// Chunks that do not add up to the data, or another root than `root`.
    pub fn finish(self, root: &Hash) -> Result<Chunks, FormatError> {
        if self.starts.len() as u64 != self.head.chunks {
            return Err(FormatError::Short("index"));
        }
        if self.block * BLOCK != self.head.data_bytes {
            return Err(value("index", "data_bytes", self.head.data_bytes));
        }
        if &Hash::from(self.root.finalize()) != root {
            return Err(FormatError::Root);
        }
        Ok(Chunks {
            starts: self.starts,
            blocks: self.block,
        })
    }
}

/// Where the chunks of a layer's data begin and end.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunks {
    starts: Vec<u32>,
    blocks: u64,
}

impl Chunks {
    #[must_use]
    pub fn len(&self) -> u32 {
        self.starts.len() as u32
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.blocks * BLOCK
    }

    /// The bytes of `data` that chunk `number` is; empty beyond the last.
    #[must_use]
    pub fn bytes(&self, number: u32) -> Range<u64> {
        let at = |n: usize| self.starts.get(n).map_or(self.blocks, |s| u64::from(*s)) * BLOCK;
        at(number as usize)..at(number as usize + 1)
    }

    /// The chunks that `count` bytes at `offset` lie in.
    #[must_use]
    pub fn covering(&self, offset: u64, count: u64) -> Range<u32> {
        let end = offset.saturating_add(count).min(self.data_bytes());
        if offset >= end {
            return 0..0;
        }
        let after = |block: u64| self.starts.partition_point(|s| u64::from(*s) <= block) as u32;
        after(offset / BLOCK) - 1..after((end - 1) / BLOCK)
    }
}

/// Where a chunk lies in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub pack: u32,
    pub offset: u32,
    pub length: u32,
    pub compressed: bool,
}

impl Place {
    #[must_use]
    pub fn is_zeros(&self) -> bool {
        self.pack == ZEROS
    }

    /// # Errors
    /// Sizes or numbers that no chunk in one of `packs` packs has.
    pub fn parse(entry: &[u8; MAP_ENTRY], packs: u32) -> Result<Self, FormatError> {
        let (pack, offset, length, encoding) =
            (u32_at(entry, 0), u32_at(entry, 4), u32_at(entry, 8), u32_at(entry, 12));
        if pack != ZEROS {
            if pack >= packs {
                return Err(value("map", "pack", pack.into()));
            }
            if length == 0 || length > MAX_STORED {
                return Err(value("map", "stored length", length.into()));
            }
            if u64::from(offset) + u64::from(length) > MAX_PACK {
                return Err(value("map", "offset", offset.into()));
            }
            if encoding > 1 {
                return Err(value("map", "encoding", encoding.into()));
            }
        }
        Ok(Self {
            pack,
            offset,
            length,
            compressed: encoding == 1,
        })
    }
}

/// The number of packs of a map for `chunks` chunks in a file of `file_bytes`.
///
/// # Errors
/// A head that is no map's, or of another layer's or length.
pub fn map_packs(head: &[u8; HEAD], chunks: u64, file_bytes: u64) -> Result<u32, FormatError> {
    if &head[..8] != b"DSECMAP2" {
        return Err(FormatError::Magic("map"));
    }
    let (packs, flags, count) = (u32_at(head, 8), u32_at(head, 12), u64_at(head, 16));
    if flags != 0 {
        return Err(value("map", "flags", flags.into()));
    }
    if count != chunks {
        return Err(value("map", "chunks", count));
    }
    if file_bytes != (HEAD + packs as usize * PACK_NAME) as u64 + count * MAP_ENTRY as u64 {
        return Err(FormatError::Short("map"));
    }
    Ok(packs)
}

/// A sha256 digest as text, without a prefix.
#[must_use]
pub fn hex(hash: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |n: u8| char::from(DIGITS[usize::from(n & 15)]);
    hash.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]).collect()
}

/// The hash that 64 lowercase hexadecimal digits say.
#[must_use]
pub fn unhex(text: &str) -> Option<Hash> {
    let digits = text.as_bytes();
    if digits.len() != 64 {
        return None;
    }
    let digit = |c: u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'a'..=b'f' => Some(c - b'a' + 10),
        _ => None,
    };
    let mut hash = [0; 32];
    for (byte, pair) in hash.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(hash)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(chunks: u64, data: u64) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        head[..8].copy_from_slice(b"DSECIDX2");
        head[8..12].copy_from_slice(&4096u32.to_le_bytes());
        head[12..16].copy_from_slice(&1024u32.to_le_bytes());
        head[16..24].copy_from_slice(&chunks.to_le_bytes());
        head[24..32].copy_from_slice(&data.to_le_bytes());
        head
    }

    fn chunks(lengths: &[u32]) -> Chunks {
        let blocks: u64 = lengths.iter().map(|n| u64::from(*n)).sum();
        let head = head(lengths.len() as u64, blocks * BLOCK);
        let entries: Vec<u8> = lengths
            .iter()
            .flat_map(|n| [&n.to_le_bytes()[..], &[7; 32]].concat())
            .collect();
        let mut root = Sha256::new_with_prefix(head);
        let mut reader = IndexReader::new(&head, (HEAD + entries.len()) as u64).unwrap();
        for page in entries.chunks(PAGE_ENTRIES as usize * INDEX_ENTRY) {
            root.update(sha256(page));
            reader.page(page).unwrap();
        }
        reader.finish(&root.finalize().into()).unwrap()
    }

    proptest! {
        #[test]
        fn a_range_lies_in_just_the_chunks_that_cover_it(
            lengths in prop::collection::vec(1u32..=64, 0..3000), offset in 0u64..1 << 30, count in 0u64..1 << 22,
        ) {
            let chunks = chunks(&lengths);
            let end = (offset + count).min(chunks.data_bytes());
            let wanted: Vec<u32> = (0..chunks.len())
                .filter(|n| { let b = chunks.bytes(*n); count > 0 && b.start < end && offset < b.end })
                .collect();
            prop_assert_eq!(chunks.covering(offset, count).collect::<Vec<_>>(), wanted);
        }

        #[test]
        fn digits_and_bytes_are_the_same(hash in any::<[u8; 32]>()) {
            prop_assert_eq!(unhex(&hex(&hash)), Some(hash));
        }
    }

    #[test]
    fn a_wrong_root_is_refused() {
        let head = head(1, 4096);
        let mut reader = IndexReader::new(&head, 100).unwrap();
        reader.page(&[&1u32.to_le_bytes()[..], &[7; 32]].concat()).unwrap();
        assert_eq!(reader.finish(&[0; 32]), Err(FormatError::Root));
    }

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        for blocks in [0u32, 65, u32::MAX] {
            let mut reader = IndexReader::new(&head(1, 4096), 100).unwrap();
            let entry = [&blocks.to_le_bytes()[..], &[0; 32]].concat();
            assert!(reader.page(&entry).is_err());
        }
        assert!(IndexHead::parse(&head(2, 4096), 100).is_err());
        assert!(IndexHead::parse(&head(1, 4097), 100).is_err());
        assert!(IndexHead::parse(&head(u64::MAX, 0), 100).is_err());
    }
}
