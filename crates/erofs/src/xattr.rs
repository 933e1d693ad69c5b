//! Inline extended attributes: a 12-byte header, then entries padded to 4 bytes.

use crate::entry::{Entry, Error};

const HEADER: usize = 12;

/// Index and length of each namespace that the format knows; the ACL names are whole names, with nothing after them.
const NAMESPACES: [(&[u8], u8, bool); 5] = [
    (b"user.", 1, false),
    (b"system.posix_acl_access", 2, true),
    (b"system.posix_acl_default", 3, true),
    (b"trusted.", 4, false),
    (b"security.", 6, false),
];

fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    NAMESPACES.iter().find_map(|(prefix, index, whole)| {
        let rest = name.strip_prefix(*prefix)?;
        (rest.is_empty() == *whole && rest.len() <= 255 && !rest.contains(&0)).then_some((*index, rest))
    })
}

/// The xattr body of an inode, empty when it has none. Its length is 0 or 12 + 4n.
pub(crate) fn body(entry: &Entry) -> Result<Vec<u8>, Error> {
    if entry.xattrs.is_empty() {
        return Ok(Vec::new());
    }
    let refuse = |why| Error::Value(entry.shown(), why);
    let mut out = vec![0_u8; HEADER];
    let mut sorted: Vec<_> = entry.xattrs.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    if sorted.windows(2).any(|pair| pair[0].name == pair[1].name) {
        return Err(refuse("an extended attribute is listed twice"));
    }
    for xattr in sorted {
        let (index, rest) = split(&xattr.name).ok_or_else(|| refuse("extended attribute of an unknown namespace"))?;
        let size = u16::try_from(xattr.value.len()).map_err(|_| refuse("extended attribute over 65535 bytes"))?;
        let length = u8::try_from(rest.len()).map_err(|_| refuse("extended attribute with an over-long name"))?;
        out.extend_from_slice(&[length, index]);
        out.extend_from_slice(&size.to_le_bytes());
        out.extend_from_slice(rest);
        out.extend_from_slice(&xattr.value);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    if count(&out).is_none() {
        return Err(refuse("extended attributes over 262,152 bytes in all"));
    }
    Ok(out)
}

/// `i_xattr_icount` for a body, if it fits.
pub(crate) fn count(body: &[u8]) -> Option<u16> {
    if body.is_empty() {
        return Some(0);
    }
    u16::try_from((body.len() - HEADER) / 4 + 1).ok()
}
