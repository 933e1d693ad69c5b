//! From a request to a running child: everything checked and prepared here, then handed to dsec_sys::launch.

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use dsec_proto::PtySize;
use dsec_sys::{Entry, Launch, Report, Streams, REPORT};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::pipe::PipeFlags;

use crate::accounts::{self, Account};
use crate::boot::Sandbox;
use crate::failure::Failure;
use crate::groups::Group;
use crate::reaper::Exit;
use crate::stream::Stream;
use crate::Aether;

const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Above the kernel's own limit on the sum of arguments and environment, which answers more exactly.
const MOST_WORDS: usize = 256 * 1024;

/// What to run, where, as whom.
pub struct Spec<'a> {
    pub argv: &'a [String],
    pub env: &'a [String],
    pub cwd: &'a str,
    pub make_cwd: bool,
    pub user: &'a str,
    pub open_files: u64,
    pub terminal: bool,
}

/// A checked command.
pub struct Prepared {
    programs: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    cwd: CString,
    make: Vec<CString>,
    account: Account,
    open_files: u64,
}

/// A child on its way to its program.
pub struct Child {
    pub pid: u32,
    pub exit: Rc<Exit>,
    pub group: Group,
    pub start: Start,
}

/// Tells whether the child reached its program.
pub struct Start {
    report: OwnedFd,
    program: String,
    cwd: String,
}

/// Our ends of a child's standard streams; a terminal has one for all three.
pub struct Ends {
    pub stdin: Option<Stream>,
    pub stdout: Stream,
    pub stderr: Option<Stream>,
}

fn text(what: &'static str, value: &str) -> Result<CString, Failure> {
    CString::new(value).map_err(|_| Failure::invalid(what, format!("{what} holds a NUL")))
}

fn value<'a>(env: &'a [String], name: &str) -> Option<&'a str> {
    env.iter().find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='))
}

impl Prepared {
    pub fn new(spec: &Spec<'_>) -> Result<Self, Failure> {
        let Some(program) = spec.argv.first().filter(|program| !program.is_empty()) else {
            return Err(Failure::invalid("command", "the command is empty"));
        };
        if spec.argv.len() + spec.env.len() > MOST_WORDS {
            return Err(Failure::invalid("command", "too many words"));
        }
        let cwd = if spec.cwd.is_empty() { "/" } else { spec.cwd };
        if !cwd.starts_with('/') {
            return Err(Failure::invalid("cwd", format!("{cwd} is not absolute")));
        }
        let account = accounts::resolve(spec.user)?;
        let env = environment(spec, &account)?;
        let path = value(spec.env, "PATH").unwrap_or(DEFAULT_PATH);
        Ok(Self {
            programs: programs(program, path)?,
            argv: spec
                .argv
                .iter()
                .map(|word| text("command", word))
                .collect::<Result<_, _>>()?,
            env,
            cwd: text("cwd", cwd)?,
            make: if spec.make_cwd { prefixes(cwd)? } else { Vec::new() },
            account,
            open_files: spec.open_files,
        })
    }

    fn launch(
        &self,
        sandbox: &Sandbox,
        group: &Group,
        streams: Streams<'_>,
        extra: Option<(BorrowedFd<'_>, RawFd)>,
        report: BorrowedFd<'_>,
    ) -> Result<u32, Failure> {
        let entry = Entry {
            tasks: &sandbox.task_files(),
            userns: sandbox.userns.as_fd(),
            uid: self.account.uid,
            gid: self.account.gid,
            groups: &self.account.groups,
            capabilities: sandbox.capabilities,
            no_new_privileges: sandbox.no_new_privileges,
            filter: &sandbox.filter,
        };
        let launch = Launch {
            entry,
            cgroup: group.as_fd(),
            streams,
            extra,
            programs: &self.programs,
            argv: &self.argv,
            env: &self.env,
            cwd: &self.cwd,
            make: &self.make,
            open_files: self.open_files,
            report,
        };
        dsec_sys::launch(&launch).map_err(|error| Failure::kernel(&error))
    }

    /// Starts the child with given streams; they are the child's ends.
    pub fn start(
        &self,
        aether: &Aether,
        streams: Streams<'_>,
        extra: Option<(BorrowedFd<'_>, RawFd)>,
    ) -> Result<Child, Failure> {
        let group = aether
            .groups
            .acquire()
            .map_err(|error| Failure::runtime(format!("cgroup: {error}")))?;
        let group = group.ok_or_else(|| Failure::limit("processes"))?;
        let begun = pipe().and_then(|(read, write)| {
            rustix::io::ioctl_fionbio(&read, true).map_err(descriptors)?;
            let pid = self.launch(&aether.sandbox, &group, streams, extra, write.as_fd())?;
            Ok((pid, read))
        });
        match begun {
            Ok((pid, report)) => {
                let exit = aether.reaper.expect(pid);
                let lossy = |text: &CString| text.to_string_lossy().into_owned();
                let program = self.argv.first().map(lossy).unwrap_or_default();
                Ok(Child {
                    pid,
                    exit,
                    group,
                    start: Start {
                        report,
                        program,
                        cwd: lossy(&self.cwd),
                    },
                })
            }
            Err(failure) => {
                aether.groups.release(group);
                Err(failure)
            }
        }
    }

    /// Starts the child on pipes; `stdin` false gives it the null device.
    pub fn start_on_pipes(&self, aether: &Aether, stdin: bool) -> Result<(Child, Ends), Failure> {
        let input = if stdin { Some(pipe()?) } else { None };
        let (out_read, out_write) = pipe()?;
        let (err_read, err_write) = pipe()?;
        let source = input
            .as_ref()
            .map_or(aether.sandbox.null.as_fd(), |(read, _)| read.as_fd());
        let streams = Streams::Given([source, out_write.as_fd(), err_write.as_fd()]);
        let child = self.start(aether, streams, None)?;
        let ends = Ends {
            stdin: input.map(|(_, write)| watched(write)).transpose()?,
            stdout: watched(out_read)?,
            stderr: Some(watched(err_read)?),
        };
        Ok((child, ends))
    }

    /// Starts the child on a terminal of its own.
    pub async fn start_on_terminal(&self, aether: &Aether, size: &PtySize) -> Result<(Child, Ends), Failure> {
        let narrow = |value: u32| u16::try_from(value).map_err(|_| Failure::invalid("pty", "the size is above 65535"));
        let (cols, rows) = (narrow(size.cols)?, narrow(size.rows)?);
        let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) = pair.map_err(descriptors)?;
        let devpts = aether.sandbox.devpts.as_fd();
        let streams = Streams::Terminal {
            devpts,
            sender: theirs.as_fd(),
            cols,
            rows,
        };
        let child = self.start(aether, streams, None)?;
        drop(theirs);
        let ours = watched(ours)?;
        let arrived = ours
            .readable()
            .await
            .map_err(|error| Failure::runtime(error.to_string()));
        let master = arrived.and_then(|()| {
            dsec_sys::receive_descriptor(ours.as_fd()).map_err(|error| match child.start.failure() {
                Some(failure) => failure,
                None => Failure::kernel(&error),
            })
        });
        let streams = master.and_then(|master| {
            let stdout = watched(master)?;
            let stdin = stdout
                .duplicate()
                .map_err(|error| Failure::runtime(error.to_string()))?;
            Ok((stdin, stdout))
        });
        match streams {
            Ok((stdin, stdout)) => Ok((
                child,
                Ends {
                    stdin: Some(stdin),
                    stdout,
                    stderr: None,
                },
            )),
            Err(failure) => {
                // Killed, and waited for by the reaper alone.
                let _ = child.group.kill();
                aether.groups.release(child.group);
                Err(failure)
            }
        }
    }
}

impl Start {
    /// The child's report, once it has ended or reached its program. None: it reached its program, or has not said yet.
    pub fn failure(&self) -> Option<Failure> {
        let mut bytes = [0; REPORT];
        rustix::io::read(&self.report, &mut bytes).ok()?;
        let report = Report::decode(&bytes)?;
        Some(Failure::start(report, &self.program, &self.cwd))
    }

    /// Whether the child runs its program, or what stopped it; None while it is on its way.
    pub fn judge(&self) -> Option<Result<(), Failure>> {
        let mut bytes = [0; REPORT];
        match rustix::io::read(&self.report, &mut bytes) {
            Err(rustix::io::Errno::AGAIN) => None,
            Ok(0) => Some(Ok(())),
            _ => Some(Err(match Report::decode(&bytes) {
                Some(report) => Failure::start(report, &self.program, &self.cwd),
                None => Failure::runtime("the child's report is not readable"),
            })),
        }
    }

    /// Waits until the child runs its program, or says why not.
    pub async fn reached(self) -> Result<Self, Failure> {
        let broken = |error: std::io::Error| Failure::runtime(error.to_string());
        let stream = Stream::new(self.report.try_clone().map_err(broken)?).map_err(broken)?;
        loop {
            stream.readable().await.map_err(broken)?;
            match self.judge() {
                Some(judged) => return judged.map(|()| self),
                None => tokio::task::yield_now().await,
            }
        }
    }
}

/// A pipe, read end first; the end that is ours is made a Stream, which stops it blocking.
pub fn pipe() -> Result<(OwnedFd, OwnedFd), Failure> {
    rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(descriptors)
}

/// A descriptor of ours as a stream.
pub fn watched(descriptor: OwnedFd) -> Result<Stream, Failure> {
    Stream::new(descriptor).map_err(|error| Failure::runtime(error.to_string()))
}

fn descriptors(errno: rustix::io::Errno) -> Failure {
    Failure::kernel(&dsec_sys::Error::new("pipe", "command", errno.raw_os_error()))
}

fn environment(spec: &Spec<'_>, account: &Account) -> Result<Vec<CString>, Failure> {
    let mut env = Vec::with_capacity(spec.env.len() + 3);
    for entry in spec.env {
        if entry.find('=').unwrap_or(0) == 0 {
            return Err(Failure::invalid("env", format!("{entry:?} is not NAME=VALUE")));
        }
        env.push(text("env", entry)?);
    }
    let mut default = |name: &str, fallback: &str| {
        if value(spec.env, name).is_none() {
            env.push(text("env", &format!("{name}={fallback}"))?);
        }
        Ok(())
    };
    default("PATH", DEFAULT_PATH)?;
    default("HOME", &account.home)?;
    if spec.terminal {
        default("TERM", "xterm")?;
    }
    Ok(env)
}

fn programs(program: &str, path: &str) -> Result<Vec<CString>, Failure> {
    if program.contains('/') {
        return Ok(vec![text("command", program)?]);
    }
    let join = |directory: &str| match directory {
        "" => text("command", &format!("./{program}")),
        _ => text("command", &format!("{directory}/{program}")),
    };
    path.split(':').map(join).collect()
}

/// Every prefix of an absolute path, shortest first.
fn prefixes(path: &str) -> Result<Vec<CString>, Failure> {
    let ends = path
        .char_indices()
        .skip(1)
        .filter(|&(_, letter)| letter == '/')
        .map(|(at, _)| at);
    ends.chain(std::iter::once(path.len()))
        .map(|end| text("cwd", &path[..end]))
        .collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{prefixes, programs};

    #[test]
    fn prefixes_lead_to_the_directory() {
        let list = |path| {
            prefixes(path)
                .unwrap()
                .iter()
                .map(|p| p.to_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(list("/a/bc/d"), ["/a", "/a/bc", "/a/bc/d"]);
        assert_eq!(list("/"), ["/"]);
    }

    #[test]
    fn programs_are_sought_in_path_only_by_bare_name() {
        let list = |program, path| {
            programs(program, path)
                .unwrap()
                .iter()
                .map(|p| p.to_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(list("ls", "/bin::/x"), ["/bin/ls", "./ls", "/x/ls"]);
        assert_eq!(list("./ls", "/bin"), ["./ls"]);
    }
}
