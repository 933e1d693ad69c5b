//! A small reader of images of its own, written from the format and not from the writer; the fuzz target uses it too.

use std::collections::{BTreeMap, HashMap};

use dsec_erofs::{Entry, Kind, Options, Xattr};

pub fn entry(path: &str, kind: Kind) -> Entry {
    Entry {
        path: path.into(),
        kind,
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: 0,
        mtime_ns: 0,
        rdev: (0, 0),
        target: Vec::new(),
        xattrs: Vec::new(),
        group: 0,
        offset: 0,
        size: 0,
    }
}

pub const OPTIONS: Options = Options {
    uuid: [7; 16],
    data_blocks: 1 << 20,
};

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.0[at..at + 2].try_into().unwrap())
    }
    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }
    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
    }
    fn xattr_size(&self, inode: usize) -> usize {
        match self.u16(inode + 2) {
            0 => 0,
            n => 12 + 4 * (n as usize - 1),
        }
    }
    fn data(&self, inode: usize) -> Vec<u8> {
        let size = self.u64(inode + 8) as usize;
        let start = self.u32(inode + 16) as usize * 4096;
        match self.u16(inode) >> 1 & 7 {
            0 => self.0[start..start + size].to_vec(),
            2 => {
                let tail = if size.is_multiple_of(4096) { 4096 } else { size % 4096 };
                let body = size - tail;
                let at = inode + 64 + self.xattr_size(inode);
                assert!(at % 4096 + tail <= 4096, "inline data crosses a block");
                let mut out = if body > 0 {
                    self.0[start..start + body].to_vec()
                } else {
                    Vec::new()
                };
                out.extend_from_slice(&self.0[at..at + tail]);
                out
            }
            other => panic!("layout {other} for in-image data"),
        }
    }
    fn names(&self, inode: usize) -> Vec<(Vec<u8>, usize, u8)> {
        let mut out = Vec::new();
        for block in self.data(inode).chunks(4096) {
            let count = u16::from_le_bytes([block[8], block[9]]) as usize / 12;
            for i in 0..count {
                let d = &block[i * 12..i * 12 + 12];
                let from = u16::from_le_bytes([d[8], d[9]]) as usize;
                let to = if i + 1 < count {
                    u16::from_le_bytes([block[i * 12 + 20], block[i * 12 + 21]]) as usize
                } else {
                    block[from..]
                        .iter()
                        .position(|&b| b == 0)
                        .map_or(block.len(), |n| from + n)
                };
                let nid = u64::from_le_bytes(d[..8].try_into().unwrap()) as usize;
                out.push((block[from..to].to_vec(), nid * 32, d[10]));
            }
        }
        assert!(out.windows(2).all(|w| w[0].0 < w[1].0), "names out of order");
        out
    }
    fn xattrs(&self, inode: usize) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut out = BTreeMap::new();
        let (mut at, end) = (inode + 64 + 12, inode + 64 + self.xattr_size(inode));
        while at < end {
            let (name, index, value) = (self.0[at] as usize, self.0[at + 1], self.u16(at + 2) as usize);
            let prefix: &[u8] = match index {
                1 => b"user.",
                2 => b"system.posix_acl_access",
                3 => b"system.posix_acl_default",
                4 => b"trusted.",
                6 => b"security.",
                n => panic!("namespace {n}"),
            };
            let full = [prefix, &self.0[at + 4..at + 4 + name]].concat();
            out.insert(full, self.0[at + 4 + name..at + 4 + name + value].to_vec());
            at = (at + 4 + name + value).next_multiple_of(4);
        }
        out
    }
    /// The entry at an inode, and its number of links.
    fn entry(&self, path: &[u8], inode: usize) -> (Entry, u32) {
        let mode = self.u16(inode + 4);
        let kind = match mode >> 12 {
            1 => Kind::Fifo,
            2 => Kind::Char,
            4 => Kind::Dir,
            6 => Kind::Block,
            8 => Kind::File,
            10 => Kind::Symlink,
            12 => Kind::Socket,
            n => panic!("type {n}"),
        };
        let mut out = entry("", kind);
        out.path = path.to_vec();
        (out.mode, out.uid, out.gid) = (mode & 0o7777, self.u32(inode + 24), self.u32(inode + 28));
        (out.mtime, out.mtime_ns) = (self.u64(inode + 32) as i64, self.u32(inode + 40));
        let raw = self.u32(inode + 16);
        match kind {
            Kind::Char | Kind::Block => out.rdev = (raw >> 8 & 0xfff, raw & 0xff | raw >> 12 & 0xf_ff00),
            Kind::Symlink => out.target = self.data(inode),
            Kind::File => out.size = self.u64(inode + 8),
            _ => {}
        }
        if out.size > 0 {
            assert_eq!(self.u16(inode) >> 1 & 7, 4);
            let at = (inode + 64 + self.xattr_size(inode)).next_multiple_of(8);
            assert_eq!(self.u16(at + 2), 1, "device");
            out.offset = u64::from(self.u32(at + 4)) * 4096;
            assert!(out.size <= 4096 << (raw & 31));
        }
        if self.u16(inode + 2) > 0 {
            let pair = |(name, value)| Xattr { name, value };
            out.xattrs = self.xattrs(inode).into_iter().map(pair).collect();
        }
        (out, self.u32(inode + 44))
    }
    fn walk(&self, path: &[u8], inode: usize, parent: usize, out: &mut Vec<(Entry, u32, usize)>) {
        let (entry, links) = self.entry(path, inode);
        let is_dir = entry.kind == Kind::Dir;
        out.push((entry, links, inode));
        if !is_dir {
            return;
        }
        for (name, child, _) in self.names(inode) {
            match name.as_slice() {
                b"." => assert_eq!(child, inode),
                b".." => assert_eq!(child, parent),
                _ => {
                    let below = if path.is_empty() {
                        name
                    } else {
                        [path, b"/", &name].concat()
                    };
                    self.walk(&below, child, inode, out);
                }
            }
        }
    }
}

pub fn read(image: &[u8]) -> Vec<(Entry, u32, usize)> {
    let reader = Reader(image);
    assert_eq!(reader.u32(1024), 0xE0F5_E1E2);
    assert_eq!(reader.u32(1024 + 36) as usize * 4096, image.len());
    let root = reader.u16(1024 + 14) as usize * 32;
    let mut out = Vec::new();
    reader.walk(b"", root, root, &mut out);
    out
}

/// `image`, built of `entries` with OPTIONS, holds them and nothing else.
pub fn check(entries: &[Entry], image: &[u8]) {
    let back = read(image);
    assert_eq!(back.len(), entries.len());
    let mut given: HashMap<&[u8], &Entry> = entries.iter().map(|e| (e.path.as_slice(), e)).collect();
    let mut inode_of_group = HashMap::new();
    for (found, links, inode) in &back {
        let mut wanted = given.remove(found.path.as_slice()).unwrap().clone();
        if wanted.group != 0 {
            let first = entries.iter().find(|e| e.group == wanted.group).unwrap();
            wanted = Entry {
                path: wanted.path,
                ..first.clone()
            };
            assert_eq!(*inode_of_group.entry(wanted.group).or_insert(*inode), *inode);
            assert_eq!(
                *links as usize,
                entries.iter().filter(|e| e.group == wanted.group).count()
            );
        } else if wanted.kind != Kind::Dir {
            assert_eq!(*links, 1);
        }
        wanted.group = 0;
        wanted.xattrs.sort_by(|a, b| a.name.cmp(&b.name));
        assert_eq!(*found, wanted);
    }
}
