//! Compiles the allow-list of schema/seccomp.toml to a seccomp program (an array of struct sock_filter, as bytes).
//!
//! The program finds a call by binary search. The kernel runs a new filter once for every call number to learn which are
//! always allowed, and aether installs it for every command, so a chain of comparisons would show in each command's start.
#![forbid(unsafe_code)]

mod list;
mod program;

pub use list::{List, Rule};
pub use program::{Program, LONGEST};

/// The platform's own list: schema/seccomp.toml as it was when this was built.
pub const PLATFORM: &str = include_str!("../../../schema/seccomp.toml");

/// Why the list cannot be compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("not the expected TOML: {0}")]
    Syntax(String),
    #[error("unknown call {0}")]
    UnknownCall(String),
    #[error("{0} is in two places")]
    Twice(String),
    #[error("unknown error name {0}")]
    UnknownErrno(String),
    #[error("architecture {0} is not supported")]
    Architecture(String),
    #[error("{0} has no reason")]
    NoReason(String),
    #[error("a rule of {0} is malformed: {1}")]
    Rule(String, &'static str),
    #[error("the program has {0} instructions, the kernel takes 4096")]
    TooLong(usize),
}

/// The program for the allow-list in `text` (the contents of schema/seccomp.toml), in the layout of the kernel.
///
/// # Errors
/// When the text is malformed, names an unknown call or error, or gives no reason for a line.
pub fn compile(text: &str) -> Result<Vec<u8>, Error> {
    Ok(Program::new(&List::parse(text)?)?.bytes())
}
