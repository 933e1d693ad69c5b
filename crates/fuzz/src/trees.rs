//! Trees of any form into EROFS images.

use dsec_erofs::{build, Entry, Kind, Xattr};

use crate::draw::Draw;

#[path = "../../erofs/tests/reader/mod.rs"]
mod reader;

const NAMES: [&str; 4] = ["a", "b", "!", "~"];

/// A name: mostly one of a few, so that paths meet; sometimes long, sometimes bytes of any kind.
fn name(draw: &mut Draw<'_>) -> Vec<u8> {
    match draw.byte() % 8 {
        0 => vec![b'n'; draw.below(300)],
        1 => {
            let length = usize::from(draw.byte() % 16);
            draw.bytes(length).to_vec()
        }
        2 => format!("{:05}", draw.number(1)).into_bytes(),
        other => NAMES[usize::from(other) % NAMES.len()].into(),
    }
}

fn xattrs(draw: &mut Draw<'_>) -> Vec<Xattr> {
    let count = match draw.byte() {
        0..200 => 0,
        200..250 => 1 + draw.byte() % 3,
        _ => draw.byte(),
    };
    let prefixes: [&[u8]; 6] = [
        b"user.",
        b"trusted.",
        b"security.",
        b"system.posix_acl_access",
        b"system.posix_acl_default",
        b"nfs4.",
    ];
    (0..count)
        .map(|number| Xattr {
            name: [
                prefixes[usize::from(draw.byte()) % 6],
                &name(draw),
                &[b'0' + number % 10],
            ]
            .concat(),
            value: vec![draw.byte(); draw.below(if number == 0 { 1 << 16 } else { 600 })],
        })
        .collect()
}

fn entry(draw: &mut Draw<'_>, directories: &[Vec<u8>]) -> Entry {
    let kind = Kind::try_from([0, 0, 1, 1, 2, 3, 4, 5, 6][usize::from(draw.byte()) % 9]).expect("a kind");
    let mut made = reader::entry("", kind);
    let parent = &directories[draw.below(directories.len())];
    let separator: &[u8] = if parent.is_empty() { b"" } else { b"/" };
    made.path = [parent, separator, &name(draw)].concat();
    made.xattrs = xattrs(draw);
    if draw.byte() < 64 {
        (made.mode, made.uid, made.gid) = (draw.number(2) as u16, draw.number(4) as u32, draw.number(4) as u32);
        (made.mtime, made.mtime_ns) = (draw.number(8) as i64, draw.number(4) as u32);
    }
    match kind {
        Kind::File => {
            made.group = u64::from(draw.byte() % 8).saturating_sub(4);
            let width = 1 + usize::from(draw.byte() % 5);
            made.size = draw.number(width).saturating_sub(16);
            made.offset = if made.size > 0 { draw.number(2) * 2048 } else { 0 };
        }
        Kind::Symlink => made.target = vec![b't' * (draw.byte() & 1); draw.below(4200)],
        Kind::Char | Kind::Block => made.rdev = (draw.number(2) as u32, draw.number(3) as u32),
        _ => {}
    }
    made
}

/// Any list of entries is refused with a typed error or gives an image that reads back as the list.
pub fn erofs(data: &[u8]) {
    let mut draw = Draw(data);
    let mut directories = vec![Vec::new()];
    let mut entries = vec![reader::entry("", Kind::Dir)];
    while !draw.is_empty() && entries.len() < 2000 {
        let made = entry(&mut draw, &directories);
        if draw.byte() < 250 && entries.iter().any(|each| each.path == made.path) {
            continue; // most duplicates would end in the same refusal
        }
        if made.kind == Kind::Dir {
            directories.push(made.path.clone());
        }
        entries.push(made);
    }
    // What is refused even alone is the reason of the refusal; all others together have to be taken.
    let whole = build(&entries, &reader::OPTIONS);
    if let Ok(image) = &whole {
        reader::check(&entries, image);
        return;
    }
    let root = reader::entry("", Kind::Dir);
    let good = |each: &Entry| {
        let mut alone = each.clone();
        alone.path = alone
            .path
            .rsplit(|&byte| byte == b'/')
            .next()
            .unwrap_or_default()
            .to_vec();
        !each.path.starts_with(b"/") && build(&[root.clone(), alone], &reader::OPTIONS).is_ok()
    };
    let mut kept = vec![root.clone()];
    for each in entries.iter().skip(1).filter(|each| good(each)) {
        let parent = each
            .path
            .iter()
            .rposition(|&byte| byte == b'/')
            .map_or(&[][..], |at| &each.path[..at]);
        let stands = kept.iter().any(|other| other.kind == Kind::Dir && other.path == parent);
        if stands && kept.iter().all(|other| other.path != each.path) {
            kept.push(each.clone());
        }
    }
    let image = build(&kept, &reader::OPTIONS).expect("each of these was taken alone");
    reader::check(&kept, &image);
}
