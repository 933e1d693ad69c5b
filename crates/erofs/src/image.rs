//! The image itself: superblock, device table, inodes, directory blocks.

use crate::directory;
use crate::entry::{Entry, Error, Kind};
use crate::layout::{lay_out, names, Data, Layout, Place, INDEX, SLOT};
use crate::tree::{grow, Node};
use crate::{xattr, BLOCK, MAX_BLOCKS};

const SUPER: usize = 1024;
const SUPER_SIZE: usize = 128;
const MAGIC: u32 = 0xE0F5_E1E2;
const COMPAT_CHECKSUM_MTIME: u32 = 0x1 | 0x2;
const INCOMPAT_CHUNKED_DEVICES: u32 = 0x4 | 0x8;
const DEVICE_SLOT: usize = 128;
const DEVICE_SLOT_NUMBER: u16 = ((SUPER + SUPER_SIZE) / DEVICE_SLOT) as u16;
const NO_BLOCK: u32 = u32::MAX;
const CHUNK_INDEXES: u32 = 0x20;

/// What the image says of itself. `data_blocks`: blocks of the data blob, whose file the mounter names with `device=`.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Identity of the filesystem; derive it from the content, so that equal trees give equal images.
    pub uuid: [u8; 16],
    /// Size of the data blob in blocks.
    pub data_blocks: u64,
}

/// Data layouts of `i_format`, already shifted, with the bit of the extended inode.
enum Format {
    Plain = 1,
    Inline = 1 | 2 << 1,
    Chunked = 1 | 4 << 1,
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

/// CRC-32C without the final inversion, as the superblock has it.
fn crc32c(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg())
        })
    })
}

fn narrow(blocks: u64) -> Result<u32, Error> {
    if blocks >= MAX_BLOCKS {
        return Err(Error::TooLarge(blocks));
    }
    u32::try_from(blocks).map_err(|_| Error::TooLarge(blocks))
}

fn device_number(rdev: (u32, u32)) -> u32 {
    (rdev.1 & 0xff) | rdev.0 << 8 | (rdev.1 & !0xff) << 12
}

/// Format, `i_u` and size of an inode. `first_own`: the first block behind the inodes.
fn describe(node: &Node<'_>, place: &Place, first_own: u32) -> (Format, u32, u64) {
    let own = first_own + place.blocks as u32;
    let entry = node.entry;
    match &place.data {
        Data::None if matches!(entry.kind, Kind::Char | Kind::Block) => (Format::Plain, device_number(entry.rdev), 0),
        Data::None => (Format::Plain, if entry.kind == Kind::File { NO_BLOCK } else { 0 }, 0),
        Data::Chunks { bits, .. } => (Format::Chunked, bits | CHUNK_INDEXES, entry.size),
        Data::Target { inline: true } => (Format::Inline, NO_BLOCK, entry.target.len() as u64),
        Data::Target { inline: false } => (Format::Plain, own, entry.target.len() as u64),
        Data::Names { shape, inline: true } if shape.ends.len() == 1 => (Format::Inline, NO_BLOCK, shape.size()),
        Data::Names { shape, inline: true } => (Format::Inline, own, shape.size()),
        Data::Names { shape, inline: false } => (Format::Plain, own, shape.size()),
    }
}

fn write_inode(image: &mut [u8], node: &Node<'_>, place: &Place, number: usize, first_own: u32) {
    let entry = node.entry;
    let at = place.position as usize;
    let (format, union, size) = describe(node, place, first_own);
    put(image, at, &(format as u16).to_le_bytes());
    put(image, at + 2, &xattr::count(&place.xattrs).unwrap_or(0).to_le_bytes());
    put(image, at + 4, &(entry.kind.mode_bits() | entry.mode).to_le_bytes());
    put(image, at + 8, &size.to_le_bytes());
    put(image, at + 16, &union.to_le_bytes());
    put(image, at + 20, &(number as u32 + 1).to_le_bytes());
    put(image, at + 24, &entry.uid.to_le_bytes());
    put(image, at + 28, &entry.gid.to_le_bytes());
    put(image, at + 32, &entry.mtime.to_le_bytes());
    put(image, at + 40, &entry.mtime_ns.to_le_bytes());
    put(image, at + 44, &node.links.to_le_bytes());
    put(image, at + 64, &place.xattrs);
}

/// The chunk indexes: device 1, consecutive blocks of the data blob.
fn write_chunks(image: &mut [u8], node: &Node<'_>, place: &Place, bits: u32, count: u64) {
    let first = node.entry.offset / BLOCK;
    let at = (place.position + place.head()).next_multiple_of(INDEX);
    for chunk in 0..count {
        let block = (first + (chunk << bits)) as u32;
        let index = (at + chunk * INDEX) as usize;
        put(image, index + 2, &1_u16.to_le_bytes());
        put(image, index + 4, &block.to_le_bytes());
    }
}

fn write_names(image: &mut [u8], nodes: &[Node<'_>], layout: &Layout, number: usize) {
    let place = &layout.places[number];
    let Data::Names { shape, inline } = &place.data else {
        return;
    };
    let nid = |inode: usize| layout.places[inode].position / SLOT;
    let content = directory::content(&names(nodes, number), shape, nid);
    let own = ((layout.inode_blocks + place.blocks) * BLOCK) as usize;
    let outside = if *inline {
        content.len() - shape.last
    } else {
        content.len()
    };
    put(image, own, &content[..outside]);
    put(image, (place.position + place.head()) as usize, &content[outside..]);
}

fn write_super(image: &mut [u8], options: &Options, inodes: u64, root: u16, blocks: u32, data_blocks: u32) {
    put(image, SUPER, &MAGIC.to_le_bytes());
    put(image, SUPER + 8, &COMPAT_CHECKSUM_MTIME.to_le_bytes());
    put(image, SUPER + 12, &[BLOCK.trailing_zeros() as u8]);
    put(image, SUPER + 14, &root.to_le_bytes());
    put(image, SUPER + 16, &inodes.to_le_bytes());
    put(image, SUPER + 36, &blocks.to_le_bytes());
    put(image, SUPER + 48, &options.uuid);
    put(image, SUPER + 80, &INCOMPAT_CHUNKED_DEVICES.to_le_bytes());
    put(image, SUPER + 86, &1_u16.to_le_bytes());
    put(image, SUPER + 88, &DEVICE_SLOT_NUMBER.to_le_bytes());
    let device = DEVICE_SLOT_NUMBER as usize * DEVICE_SLOT;
    put(image, device + 64, &data_blocks.to_le_bytes());
    put(image, device + 68, &blocks.to_le_bytes());
    let checksum = crc32c(&image[SUPER..BLOCK as usize]);
    put(image, SUPER + 4, &checksum.to_le_bytes());
}

/// The metadata image of `entries`, in any order; every parent directory must be listed, the root as the empty path.
///
/// # Errors
/// [`Error`] for a tree that the format cannot hold; nothing is ever cut short or changed to fit.
pub fn build(entries: &[Entry], options: &Options) -> Result<Vec<u8>, Error> {
    let data_blocks = narrow(options.data_blocks)?;
    let nodes = grow(entries, options.data_blocks)?;
    let layout = lay_out(&nodes, (SUPER + SUPER_SIZE + DEVICE_SLOT) as u64)?;
    let blocks = narrow(layout.inode_blocks + layout.own_blocks)?;
    let first_own = narrow(layout.inode_blocks)?;
    let mut image = vec![0_u8; blocks as usize * BLOCK as usize];
    for (number, (node, place)) in nodes.iter().zip(&layout.places).enumerate() {
        write_inode(&mut image, node, place, number, first_own);
        match place.data {
            Data::None => {}
            Data::Chunks { bits, count } => write_chunks(&mut image, node, place, bits, count),
            Data::Target { inline } => {
                let own = (layout.inode_blocks + place.blocks) * BLOCK;
                let at = if inline { place.position + place.head() } else { own };
                put(&mut image, at as usize, &node.entry.target);
            }
            Data::Names { .. } => write_names(&mut image, &nodes, &layout, number),
        }
    }
    // The root is laid out first, so its number is small whatever its own size.
    let root = layout.places.first().map_or(0, |place| place.position / SLOT) as u16;
    write_super(&mut image, options, nodes.len() as u64, root, blocks, data_blocks);
    Ok(image)
}
