//! `failed` replies: codes of schema/errors.toml.

use dsec_proto::{FailedReply, Reply};
use dsec_sys::{Report, Stage};
use rustix::io::Errno;

/// Why an operation is refused or failed; becomes a `failed` reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub code: &'static str,
    pub what: &'static str,
    pub detail: String,
}

impl Failure {
    pub fn new(code: &'static str, what: &'static str, detail: impl Into<String>) -> Self {
        Self {
            code,
            what,
            detail: detail.into(),
        }
    }

    pub fn invalid(what: &'static str, detail: impl Into<String>) -> Self {
        Self::new("invalid_argument", what, detail)
    }

    pub fn missing(what: &'static str, detail: impl Into<String>) -> Self {
        Self::new("not_found", what, detail)
    }

    pub fn limit(what: &'static str) -> Self {
        Self::new("limit_reached", what, format!("the limit on {what} is reached"))
    }

    pub fn runtime(detail: impl Into<String>) -> Self {
        Self::new("runtime_failure", "", detail)
    }

    /// A kernel's refusal of something done for a command.
    pub fn kernel(error: &dsec_sys::Error) -> Self {
        match Errno::from_raw_os_error(error.errno) {
            Errno::AGAIN => Self::limit("processes"),
            Errno::MFILE | Errno::NFILE => Self::limit("open_files"),
            Errno::NOMEM => Self::limit("memory"),
            _ => Self::runtime(error.to_string()),
        }
    }

    /// A kernel's refusal of a file operation; `path` is what it was about.
    pub fn file(errno: Errno, path: &str) -> Self {
        let detail = format!("{path}: {errno}");
        match errno {
            Errno::NOENT | Errno::NOTDIR => Self::missing("file", detail),
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Self::new("permission_denied", "file", detail),
            Errno::EXIST | Errno::NOTEMPTY | Errno::BUSY | Errno::TXTBSY => Self::new("conflict", "file", detail),
            Errno::ISDIR | Errno::INVAL | Errno::NAMETOOLONG | Errno::LOOP => Self::invalid("file", detail),
            Errno::NXIO | Errno::NODEV => Self::invalid("file", detail),
            Errno::DQUOT | Errno::NOSPC => Self::new("limit_reached", "disk", detail),
            Errno::FBIG => Self::new("limit_reached", "file_size", detail),
            Errno::MFILE | Errno::NFILE => Self::limit("open_files"),
            Errno::NOMEM => Self::limit("memory"),
            _ => Self::runtime(detail),
        }
    }

    /// What a child reported before it reached its program.
    pub fn start(report: Report, program: &str, cwd: &str) -> Self {
        let errno = Errno::from_raw_os_error(report.errno);
        let of = |subject: &str| format!("{subject}: {errno}");
        match (report.stage, errno) {
            (Stage::Execute, Errno::NOENT) => Self::new("command_not_found", "command", of(program)),
            (Stage::Execute, Errno::TOOBIG) => Self::invalid("command", of(program)),
            (Stage::Execute, Errno::NOMEM) => Self::limit("memory"),
            (Stage::Execute, Errno::AGAIN) => Self::limit("processes"),
            (Stage::Execute, _) => Self::new("command_not_executable", "command", of(program)),
            (Stage::Directory, Errno::ACCESS) => Self::new("permission_denied", "cwd", of(cwd)),
            (Stage::Directory, Errno::NOENT | Errno::NOTDIR) => Self::missing("cwd", of(cwd)),
            (Stage::Directory, _) => Self::invalid("cwd", of(cwd)),
            (Stage::OpenFiles, _) => Self::invalid("open_files", of("open_files")),
            (Stage::Identity, Errno::INVAL) => Self::invalid("user", "the user has no place in the sandbox"),
            (Stage::Streams, Errno::NOSPC) => Self::limit("ptys"),
            (stage, errno) => Self::runtime(format!("{stage:?}: {errno}")),
        }
    }

    pub fn reply(self) -> Reply {
        // A detail is for people; one that quotes a long path must not push the reply over the frame's limit.
        let detail: String = self.detail.chars().take(4096).collect();
        Reply::Failed(FailedReply {
            code: self.code.to_owned(),
            detail,
            what: self.what.to_owned(),
        })
    }
}
