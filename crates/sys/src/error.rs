//! What a failed call says: which operation, on what, and the kernel's reason.

use std::ffi::CString;
use std::fmt;
use std::io;
use std::path::Path;

/// A failed system call: its name, what it was done to, and errno.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    pub op: &'static str,
    pub path: String,
    pub errno: i32,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    #[must_use]
    pub fn new(op: &'static str, path: impl Into<String>, errno: i32) -> Self {
        Self {
            op,
            path: path.into(),
            errno,
        }
    }

    /// The error that the calling thread's errno names.
    #[must_use]
    pub fn last(op: &'static str, path: impl Into<String>) -> Self {
        Self::new(op, path, io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// An `io::Error` of the standard library under our names.
    #[must_use]
    pub fn from_io(op: &'static str, path: &Path, error: &io::Error) -> Self {
        Self::new(op, path.to_string_lossy(), error.raw_os_error().unwrap_or(libc::EIO))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = io::Error::from_raw_os_error(self.errno);
        write!(f, "{} {}: {why}", self.op, self.path)
    }
}

impl std::error::Error for Error {}

/// A C string, or EINVAL for text with a NUL in it.
///
/// # Errors
/// EINVAL when `text` holds a NUL byte.
pub fn c_string(op: &'static str, text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::new(op, text.replace('\0', "\\0"), libc::EINVAL))
}

/// The value of a call that answers -1 with errno set.
pub(crate) fn check(value: libc::c_long, op: &'static str, path: &str) -> Result<libc::c_long> {
    if value < 0 {
        return Err(Error::last(op, path));
    }
    Ok(value)
}
