//! The image read back.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod reader;

use dsec_erofs::{build, Entry, Error, Kind, Options, Xattr};
use proptest::prelude::*;
use reader::{check, entry, read, OPTIONS};

fn check_round_trip(entries: &[Entry]) {
    check(entries, &build(entries, &OPTIONS).unwrap());
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
    for i in 0..5000_usize {
        let mut e = entry(&format!("big/{:0>width$}", i, width = 4 + i % 200), Kind::File);
        e.group = if i.is_multiple_of(5) { 9 } else { 0 };
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
