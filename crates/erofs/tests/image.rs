//! The image read back by a small reader of its own, written from the format and not from the writer.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::{BTreeMap, HashMap};

use dsec_erofs::{build, Entry, Error, Kind, Options, Xattr};
use proptest::prelude::*;

fn entry(path: &str, kind: Kind) -> Entry {
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

const OPTIONS: Options = Options {
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
                let tail = if size % 4096 == 0 { 4096 } else { size % 4096 };
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

fn read(image: &[u8]) -> Vec<(Entry, u32, usize)> {
    let reader = Reader(image);
    assert_eq!(reader.u32(1024), 0xE0F5_E1E2);
    assert_eq!(reader.u32(1024 + 36) as usize * 4096, image.len());
    let root = reader.u16(1024 + 14) as usize * 32;
    let mut out = Vec::new();
    reader.walk(b"", root, root, &mut out);
    out
}

fn check_round_trip(entries: &[Entry]) {
    let image = build(entries, &OPTIONS).unwrap();
    let back = read(&image);
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

#[test]
fn holds_the_extremes_of_each_field() {
    let mut file = entry("d/f", Kind::File);
    (file.offset, file.size, file.uid, file.gid, file.mode) = (8192, 4097, u32::MAX - 1, 1 << 21, 0o6755);
    (file.mtime, file.mtime_ns) = (-2_177_452_801, 999_999_999);
    file.xattrs.push(Xattr {
        name: b"user.long".to_vec(),
        value: vec![1; 65_535],
    });
    file.xattrs.extend((0..300).map(|i| Xattr {
        name: format!("user.n{i}").into(),
        value: vec![2; 50],
    }));
    let mut link = entry("l", Kind::Symlink);
    link.target = vec![b'x'; 4095];
    let mut device = entry("c", Kind::Char);
    device.rdev = (4095, (1 << 20) - 1);
    let whiteout = entry("w", Kind::Char);
    let mut all = vec![
        entry("", Kind::Dir),
        entry("d", Kind::Dir),
        file,
        link,
        device,
        whiteout,
    ];
    all.push(entry("!before-dot", Kind::Fifo));
    all.push(entry(&"n".repeat(255), Kind::Socket));
    check_round_trip(&all);
}

#[test]
fn large_directories_and_many_links() {
    let mut all = vec![entry("", Kind::Dir), entry("big", Kind::Dir)];
    for i in 0..5000 {
        let mut e = entry(&format!("big/{:0>width$}", i, width = 4 + i % 200), Kind::File);
        e.group = if i % 5 == 0 { 9 } else { 0 };
        all.push(e);
    }
    check_round_trip(&all);
}

#[test]
fn a_root_of_any_size() {
    for count in [0, 100, 150, 200, 250, 10_000] {
        let mut all = vec![entry("", Kind::Dir)];
        all.extend((0..count).map(|i| entry(&format!("dir{i}"), Kind::Dir)));
        check_round_trip(&all);
        let image = build(&all, &OPTIONS).unwrap();
        assert_eq!(read(&image)[0].1, 2 + count);
    }
}

#[test]
fn refuses_by_name() {
    let root = entry("", Kind::Dir);
    let refused = |extra: Entry| build(&[root.clone(), extra], &OPTIONS).unwrap_err();
    assert!(matches!(refused(entry("a/b", Kind::File)), Error::NoParent(_)));
    for bad in ["/a", "a/", ".", "..", "a\0b", &"x".repeat(256)] {
        assert!(
            matches!(refused(entry(bad, Kind::File)), Error::Path(_) | Error::NoParent(_)),
            "{bad:?}"
        );
    }
    assert!(matches!(refused(entry("", Kind::Dir)), Error::Duplicate(_)));
    let mut far = entry("f", Kind::File);
    (far.size, far.offset) = (1, OPTIONS.data_blocks * 4096);
    assert!(matches!(refused(far), Error::Value(..)));
    let mut odd = entry("f", Kind::File);
    odd.xattrs.push(Xattr {
        name: b"nfs4.acl".to_vec(),
        value: vec![],
    });
    assert!(matches!(refused(odd), Error::Value(..)));
    let huge = Options {
        uuid: [0; 16],
        data_blocks: 1 << 32,
    };
    assert_eq!(
        build(std::slice::from_ref(&root), &huge).unwrap_err(),
        Error::TooLarge(1 << 32)
    );
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![
        4 => Just(Kind::File), 4 => Just(Kind::Dir), 1 => Just(Kind::Symlink), 1 => Just(Kind::Fifo),
        1 => Just(Kind::Socket), 1 => Just(Kind::Char), 1 => Just(Kind::Block)
    ]
}

prop_compose! {
    fn entries()(parts in prop::collection::vec(
        (any::<prop::sample::Index>(), "[ -.0-~]{1,40}", kinds(), 0_u16..0o10000, any::<(u32, u32)>(), any::<i64>(),
         0_u32..1_000_000_000, (0_u64..1000, 0_u64..100_000),
         prop::collection::btree_map("user\\.[a-z]{1,30}", prop::collection::vec(any::<u8>(), 0..500), 0..4),
         (0_u64..4, 1_usize..4096)), 0..120)) -> Vec<Entry> {
        let mut out = vec![entry("", Kind::Dir)];
        let mut seen = std::collections::HashSet::new();
        for (at, name, kind, mode, owner, mtime, mtime_ns, (block, size), xattrs, (group, length)) in parts {
            let dirs: Vec<_> = out.iter().filter(|e| e.kind == Kind::Dir).map(|e| e.path.clone()).collect();
            let dir = at.get(&dirs);
            let path = if dir.is_empty() { name.clone().into_bytes() } else { [dir, b"/".as_slice(), name.as_bytes()].concat() };
            if name == "." || name == ".." || !seen.insert(path.clone()) {
                continue;
            }
            let mut e = entry("", kind);
            (e.path, e.mode, e.uid, e.gid, e.mtime, e.mtime_ns) = (path, mode, owner.0, owner.1, mtime, mtime_ns);
            e.xattrs = xattrs.into_iter().map(|(n, value)| Xattr { name: n.into(), value }).collect();
            match kind {
                Kind::File => {
                    (e.size, e.group) = (size, group);
                    e.offset = if size > 0 { block * 4096 } else { 0 };
                }
                Kind::Symlink => e.target = vec![b't'; length],
                Kind::Char | Kind::Block => e.rdev = (owner.0 & 0xfff, owner.1 & 0xf_ffff),
                _ => {}
            }
            out.push(e);
        }
        out
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_tree_reads_back(entries in entries()) {
        check_round_trip(&entries);
    }
    #[test]
    fn order_of_the_list_does_not_matter(entries in entries()) {
        let ungrouped: Vec<_> = entries.into_iter().map(|e| Entry { group: 0, ..e }).collect();
        let mut turned = ungrouped.clone();
        turned.reverse();
        prop_assert_eq!(build(&ungrouped, &OPTIONS).unwrap(), build(&turned, &OPTIONS).unwrap());
    }
}
