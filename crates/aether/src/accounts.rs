//! Users and groups of the sandbox, by its own /etc/passwd and /etc/group, as docker reads them.

use std::fs::File;
use std::io::Read;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, CWD};

use crate::failure::Failure;

/// Larger files are read this far.
const LONGEST_FILE: u64 = 4 * 1024 * 1024;
/// First identifier outside the sandbox's map.
const END_OF_MAP: u32 = 65536;
const MOST_GROUPS: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: String,
}

/// `user` is "", a name or a uid, and ":group" (a name or a gid) behind it. A number needs no entry: its group is then 0
/// and its home "/". Without ":group", the groups that list the user come with it.
pub fn resolve(user: &str) -> Result<Account, Failure> {
    let (passwd, group) = (read("/etc/passwd"), read("/etc/group"));
    find(user, &passwd, &group)
}

fn read(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    // A symlink into /proc/self/fd would lead through aether's own descriptors out of the sandbox.
    let Ok(file) = rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_MAGICLINKS) else {
        return bytes;
    };
    let regular = rustix::fs::fstat(&file).map(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile);
    if regular == Ok(true) {
        // What cannot be read counts as not there: numbers still work.
        let _ = File::from(file).take(LONGEST_FILE).read_to_end(&mut bytes);
    }
    bytes
}

struct Entry<'a> {
    name: &'a str,
    id: u32,
    rest: Vec<&'a str>,
}

/// Lines `name:password:id:...`; others are skipped.
fn entries(text: &[u8]) -> impl Iterator<Item = Entry<'_>> {
    text.split(|&byte| byte == b'\n').filter_map(|line| {
        let mut fields = std::str::from_utf8(line).ok()?.split(':');
        let (name, _, id) = (fields.next()?, fields.next()?, fields.next()?.parse().ok()?);
        Some(Entry {
            name,
            id,
            rest: fields.collect(),
        })
    })
}

fn find(user: &str, passwd: &[u8], group: &[u8]) -> Result<Account, Failure> {
    let (name, group_name) = match user.split_once(':') {
        Some((name, group_name)) => (name, Some(group_name)),
        None => (user, None),
    };
    let name = if name.is_empty() { "0" } else { name };
    let number = name.parse::<u32>().ok();
    let by_name = entries(passwd).find(|entry| entry.name == name);
    let entry = by_name.or_else(|| entries(passwd).find(|entry| Some(entry.id) == number));
    let uid = match (&entry, number) {
        (Some(entry), _) => entry.id,
        (None, Some(number)) => number,
        (None, None) if name == "root" => 0,
        (None, None) => return Err(Failure::missing("user", format!("no user {name} in the sandbox"))),
    };
    let field = |at: usize| entry.as_ref().and_then(|entry| entry.rest.get(at).copied());
    let mut account = Account {
        uid,
        gid: field(0).and_then(|gid| gid.parse().ok()).unwrap_or(0),
        groups: Vec::new(),
        home: field(2)
            .filter(|home| home.starts_with('/'))
            .unwrap_or(if uid == 0 { "/root" } else { "/" })
            .to_owned(),
    };
    match group_name.filter(|name| !name.is_empty()) {
        Some(wanted) => account.gid = find_group(wanted, group)?,
        None => {
            if let Some(entry) = &entry {
                account.groups = memberships(entry.name, group);
            }
        }
    }
    if account.uid >= END_OF_MAP || account.gid >= END_OF_MAP {
        return Err(Failure::invalid(
            "user",
            format!("{user} is outside the sandbox's identifiers"),
        ));
    }
    Ok(account)
}

fn find_group(wanted: &str, group: &[u8]) -> Result<u32, Failure> {
    let entry = entries(group).find(|entry| entry.name == wanted);
    entry
        .map(|entry| entry.id)
        .or_else(|| wanted.parse().ok())
        .ok_or_else(|| Failure::missing("user", format!("no group {wanted} in the sandbox")))
}

fn memberships(name: &str, group: &[u8]) -> Vec<u32> {
    let lists = |entry: &Entry<'_>| {
        entry
            .rest
            .first()
            .is_some_and(|list| list.split(',').any(|member| member == name))
    };
    entries(group)
        .filter(|entry| entry.id < END_OF_MAP && lists(entry))
        .map(|entry| entry.id)
        .take(MOST_GROUPS)
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{find, Account};

    const PASSWD: &[u8] =
        b"root:x:0:0:r:/root:/bin/sh\nbroken\n\xff:x:1:1::/:\nu:x:1000:1001:U:/home/u:/bin/sh\n7:x:70:70::/seven:\nbig:x:70000:0::/:\n";
    const GROUP: &[u8] = b"root:x:0:\nu:x:1001:\nadm:x:4:root,u\ndocker:x:99:u\n";

    fn account(user: &str) -> Account {
        find(user, PASSWD, GROUP).unwrap()
    }

    #[test]
    fn names_numbers_and_groups() {
        let of = |uid, gid, groups: &[u32], home: &str| Account {
            uid,
            gid,
            groups: groups.to_vec(),
            home: home.into(),
        };
        assert_eq!(account(""), of(0, 0, &[4], "/root"));
        assert_eq!(account("u"), of(1000, 1001, &[4, 99], "/home/u"));
        assert_eq!(account("1000"), of(1000, 1001, &[4, 99], "/home/u"));
        assert_eq!(account("u:adm"), of(1000, 4, &[], "/home/u"));
        assert_eq!(account(":5678"), of(0, 5678, &[], "/root"));
        assert_eq!(account("1234:5678"), of(1234, 5678, &[], "/"));
        assert_eq!(account("1234"), of(1234, 0, &[], "/"));
        assert_eq!(account("7"), of(70, 70, &[], "/seven"));
        assert_eq!(find("root", b"", b"").unwrap(), of(0, 0, &[], "/root"));
    }

    #[test]
    fn what_is_not_there_is_named() {
        for (user, code) in [
            ("nobody", "not_found"),
            ("u:none", "not_found"),
            ("70000", "invalid_argument"),
            ("big", "invalid_argument"),
            ("-1", "not_found"),
        ] {
            let failure = find(user, PASSWD, GROUP).unwrap_err();
            assert_eq!((failure.code, failure.what), (code, "user"), "{user}");
        }
    }
}
