//! A program of the host's, run where the calling thread is.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use dsec_sys::{Error, Result};

/// Runs `argv` with `input`; its status (-1: ended by a signal) and the end of what it said of errors.
///
/// # Errors
/// ENOENT where there is no such program.
pub fn run(argv: &[String], input: &str) -> Result<(i32, String)> {
    let name = argv.first().map_or("", String::as_str);
    let failed = |e: std::io::Error| Error::from_io("run", Path::new(name), &e);
    let mut child = Command::new(name)
        .args(argv.get(1..).unwrap_or_default())
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    // A program that ends before it has read all says why by its status.
    let _ = child.stdin.take().map(|mut pipe| pipe.write_all(input.as_bytes()));
    let done = child.wait_with_output().map_err(failed)?;
    let said = String::from_utf8_lossy(&done.stderr[..done.stderr.len().min(2000)]).into_owned();
    Ok((done.status.code().unwrap_or(-1), said))
}
