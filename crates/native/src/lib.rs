//! `dsec._core`: converts, releases the interpreter lock, maps errors. One list of exports, nothing else.

mod erofs;
mod error;
mod hashing;
mod launch;
mod mount;
mod network;
mod pool;
mod seccomp;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    erofs::export(module)?;
    hashing::export(module)?;
    launch::export(module)?;
    mount::export(module)?;
    network::export(module)?;
    pool::export(module)?;
    seccomp::export(module)
}
