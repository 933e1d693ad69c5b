//! file_watch: changes below a path, by inotify, until the connection closes.

use std::collections::HashMap;
use std::mem::MaybeUninit;

use std::os::fd::AsFd;

use dsec_proto::{FileEventReply, FileWatchRequest, Reply};
use rustix::event::{poll, PollFd, PollFlags};
use rustix::fd::OwnedFd;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, CWD};
use rustix::io::Errno;

use super::entries::checked;
use super::list::names;
use super::wire::Wire;
use super::{Done, Halt};
use crate::failure::Failure;

/// Directories watched; the rest of a larger tree is not, and an `overflow` event says so.
const MOST_DIRECTORIES: usize = 8192;
const MOST_NAMES: usize = 65_536;

struct Watch<'w, 'a> {
    wire: &'w mut Wire<'a>,
    inotify: OwnedFd,
    paths: HashMap<i32, String>,
    recursive: bool,
    full: bool,
}

pub fn watch(wire: &mut Wire<'_>, request: &FileWatchRequest) -> Done {
    let path = checked(&request.path)?;
    let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(|errno| match errno {
        Errno::MFILE => Failure::limit("watches"),
        errno => Failure::file(errno, path),
    })?;
    let stat = rustix::fs::statat(CWD, path, AtFlags::empty()).map_err(|errno| Failure::file(errno, path))?;
    let recursive = request.recursive && FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
    let mut watch = Watch {
        wire,
        inotify,
        paths: HashMap::new(),
        recursive,
        full: false,
    };
    let root = if path == "/" { "" } else { path.trim_end_matches('/') };
    watch.add(root.to_owned(), true).map_err(|errno| match errno {
        Errno::NOSPC => Failure::limit("watches"),
        errno => Failure::file(errno, path),
    })?;
    if recursive {
        watch.add_below(root.to_owned(), false)?;
    }
    watch.wire.done()?;
    if watch.full {
        watch.send("overflow", root.to_owned())?;
    }
    watch.follow()
}

fn flags() -> WatchFlags {
    WatchFlags::CREATE
        | WatchFlags::MODIFY
        | WatchFlags::DELETE
        | WatchFlags::DELETE_SELF
        | WatchFlags::MOVED_FROM
        | WatchFlags::MOVED_TO
        | WatchFlags::ATTRIB
        | WatchFlags::EXCL_UNLINK
}

impl Watch<'_, '_> {
    fn send(&mut self, event: &str, path: String) -> Result<(), Halt> {
        let reply = FileEventReply {
            event: event.to_owned(),
            path,
        };
        Ok(self.wire.reply(&Reply::FileEvent(reply))?)
    }

    fn add(&mut self, path: String, first: bool) -> Result<(), Errno> {
        let flags = if first {
            flags()
        } else {
            flags() | WatchFlags::DONT_FOLLOW | WatchFlags::ONLYDIR
        };
        let place = if path.is_empty() { "/" } else { &path };
        let id = inotify::add_watch(&self.inotify, place, flags)?;
        self.paths.insert(id, path);
        Ok(())
    }

    /// Watches the directories below `path`; `tell`: they are new, and so is what is in them.
    fn add_below(&mut self, path: String, tell: bool) -> Result<(), Halt> {
        let mut waiting = vec![path];
        while let Some(path) = waiting.pop() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let place = if path.is_empty() { "/" } else { &path };
            let Ok(directory) = rustix::fs::open(place, flags, Mode::empty()) else {
                continue;
            };
            let Ok(list) = names(&directory, MOST_NAMES) else {
                continue;
            };
            for name in list {
                let below = format!("{path}/{}", name.to_string_lossy());
                let stat = rustix::fs::statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW);
                let is_directory = stat.is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Directory);
                if tell {
                    self.send("created", below.clone())?;
                }
                if !is_directory {
                    continue;
                }
                if self.paths.len() >= MOST_DIRECTORIES {
                    self.full = true;
                    return Ok(());
                }
                match self.add(below.clone(), false) {
                    Ok(()) => waiting.push(below),
                    Err(Errno::NOSPC) => {
                        self.full = true;
                        return Ok(());
                    }
                    // Gone or forbidden: its changes cannot be seen.
                    Err(_) => {}
                }
            }
        }
        Ok(())
    }

    fn follow(mut self) -> Done {
        let socket = self.wire.socket().try_clone().map_err(|_| Halt::Gone)?;
        let mut buffer = vec![MaybeUninit::uninit(); 16 * 1024];
        loop {
            {
                let mut waiting = [
                    PollFd::new(&self.inotify, PollFlags::IN),
                    PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN),
                ];
                match poll(&mut waiting, None) {
                    Ok(_) => {}
                    Err(Errno::INTR) => continue,
                    Err(_) => return Err(Halt::Gone),
                }
                if !waiting[1].revents().is_empty() {
                    // Whatever the edge sends now, even nothing, ends the watch.
                    return Ok(());
                }
            }
            for (events, id, name) in self.read(&mut buffer)? {
                self.judge(events, id, name)?;
            }
        }
    }

    fn read(&self, buffer: &mut [MaybeUninit<u8>]) -> Result<Vec<(ReadFlags, i32, Option<String>)>, Halt> {
        let inotify = self.inotify.try_clone().map_err(|_| Halt::Gone)?;
        let mut reader = Reader::new(inotify, buffer);
        let mut list = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => {
                    let name = event.file_name().map(|name| name.to_string_lossy().into_owned());
                    list.push((event.events(), event.wd(), name));
                }
                Err(Errno::AGAIN) => return Ok(list),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Failure::runtime(format!("inotify: {errno}")).into()),
            }
            if reader.is_buffer_empty() {
                return Ok(list);
            }
        }
    }

    fn judge(&mut self, events: ReadFlags, id: i32, name: Option<String>) -> Result<(), Halt> {
        if events.contains(ReadFlags::QUEUE_OVERFLOW) {
            return self.send("overflow", String::new());
        }
        if events.contains(ReadFlags::IGNORED) {
            self.paths.remove(&id);
            return Ok(());
        }
        let Some(directory) = self.paths.get(&id) else {
            return Ok(());
        };
        let path = match &name {
            Some(name) => format!("{directory}/{name}"),
            None => directory.clone(),
        };
        let new = events.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO);
        let kinds = [
            (ReadFlags::CREATE, "created"),
            (ReadFlags::MODIFY, "modified"),
            (ReadFlags::DELETE, "removed"),
            (ReadFlags::MOVED_FROM, "moved_from"),
            (ReadFlags::MOVED_TO, "moved_to"),
            (ReadFlags::ATTRIB, "attributes"),
        ];
        // A watched directory's own end is told by its parent's watch, but for the root of all.
        let own_end = events.contains(ReadFlags::DELETE_SELF) && self.paths.len() == 1;
        if let Some((_, event)) = kinds.iter().find(|(flag, _)| events.contains(*flag)) {
            self.send(event, path.clone())?;
        } else if own_end {
            self.send("removed", path.clone())?;
        }
        if new && self.recursive && events.contains(ReadFlags::ISDIR) && !self.full {
            if self.paths.len() >= MOST_DIRECTORIES || self.add(path.clone(), false) == Err(Errno::NOSPC) {
                self.full = true;
            } else {
                self.add_below(path, true)?;
            }
            if self.full {
                self.send("overflow", String::new())?;
            }
        }
        Ok(())
    }
}
