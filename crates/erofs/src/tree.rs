//! From a list of entries to inodes and directories.

use std::collections::hash_map::{Entry as Slot, HashMap};

use crate::entry::{Entry, Error, Kind};

/// An inode: the entry that gives its attributes, its link count, and for a directory its parent and children.
pub(crate) struct Node<'a> {
    pub(crate) entry: &'a Entry,
    pub(crate) links: u32,
    pub(crate) parent: usize,
    pub(crate) children: Vec<(&'a [u8], usize)>,
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&b| b == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    }
}

fn check_name(entry: &Entry, name: &[u8]) -> Result<(), Error> {
    let bad = name.is_empty() || name.len() > 255 || name == b"." || name == b".." || name.contains(&0);
    if bad || entry.path.first() == Some(&b'/') {
        return Err(Error::Path(entry.shown()));
    }
    Ok(())
}

/// Orders entries so that parents come first and a directory's names are sorted; refuses repeats.
fn ordered(entries: &[Entry]) -> Result<Vec<&Entry>, Error> {
    let mut sorted: Vec<&Entry> = entries.iter().collect();
    sorted.sort_by(|a, b| split(&a.path).cmp(&split(&b.path)));
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].path == pair[1].path) {
        return Err(Error::Duplicate(pair[0].shown()));
    }
    Ok(sorted)
}

/// The first entry of each group of hard links.
fn firsts(entries: &[Entry]) -> HashMap<u64, &Entry> {
    let mut found = HashMap::new();
    for entry in entries.iter().filter(|e| e.group != 0) {
        found.entry(entry.group).or_insert(entry);
    }
    found
}

/// Sorting by (parent, name) puts a directory behind deeper ones of an earlier name, so take them level by level.
fn by_level<'a>(sorted: &[&'a Entry]) -> Vec<&'a Entry> {
    let mut waiting = sorted.to_vec();
    waiting.sort_by_key(|e| e.path.iter().filter(|&&b| b == b'/').count());
    waiting
}

/// The inodes, root first, then directory by directory.
pub(crate) fn grow(entries: &[Entry], data_blocks: u64) -> Result<Vec<Node<'_>>, Error> {
    let sorted = ordered(entries)?;
    let root = sorted.first().filter(|e| e.path.is_empty() && e.kind == Kind::Dir);
    let root = *root.ok_or_else(|| Error::NoParent(String::new()))?;
    root.check(data_blocks)?;
    let mut nodes = vec![Node {
        entry: root,
        links: 2,
        parent: 0,
        children: Vec::new(),
    }];
    let mut directories: HashMap<&[u8], usize> = HashMap::from([(&[] as &[u8], 0)]);
    let mut groups: HashMap<u64, usize> = HashMap::new();
    let first_of_group = firsts(entries);
    for entry in by_level(&sorted[1..]) {
        let (parent_path, name) = split(&entry.path);
        check_name(entry, name)?;
        entry.check(data_blocks)?;
        let parent = *directories
            .get(parent_path)
            .ok_or_else(|| Error::NoParent(entry.shown()))?;
        let number = match groups.entry(entry.group) {
            Slot::Occupied(slot) if entry.group != 0 => {
                let number = *slot.get();
                if nodes[number].entry.kind != entry.kind {
                    return Err(Error::Value(entry.shown(), "hard link of another kind than its group"));
                }
                nodes[number].links += 1;
                number
            }
            slot => {
                let number = nodes.len();
                if entry.group != 0 {
                    slot.insert_entry(number);
                }
                let source = first_of_group.get(&entry.group).copied().unwrap_or(entry);
                if source.kind != entry.kind {
                    return Err(Error::Value(entry.shown(), "hard link of another kind than its group"));
                }
                let links = if entry.kind == Kind::Dir { 2 } else { 1 };
                nodes.push(Node {
                    entry: source,
                    links,
                    parent,
                    children: Vec::new(),
                });
                number
            }
        };
        if entry.kind == Kind::Dir {
            directories.insert(&entry.path, number);
            nodes[parent].links += 1;
        }
        nodes[parent].children.push((name, number));
    }
    Ok(nodes)
}
