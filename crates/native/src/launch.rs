//! Namespaces made ahead, and the launch of a sandbox's first process.

use std::os::fd::IntoRawFd;

use dsec_launcher::{Cell, SYS_SKELETON};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::raised;

/// Descriptors of the user, net, ipc and uts namespaces.
#[pyfunction]
fn make_namespaces(py: Python<'_>, base: u32, owner: u32) -> PyResult<(i32, i32, i32, i32)> {
    let made = py.detach(|| dsec_sys::make_namespaces(base, owner)).map_err(raised)?;
    Ok((
        made.user.into_raw_fd(),
        made.net.into_raw_fd(),
        made.ipc.into_raw_fd(),
        made.uts.into_raw_fd(),
    ))
}

#[pyfunction]
fn make_stage(py: Python<'_>, scratch: &str) -> PyResult<i32> {
    let stage = py
        .detach(|| dsec_sys::make_stage(scratch, &SYS_SKELETON))
        .map_err(raised)?;
    Ok(stage.into_raw_fd())
}

#[pyfunction]
fn sealed_file(py: Python<'_>, name: &str, data: &[u8], program: bool) -> PyResult<i32> {
    let file = py
        .detach(|| dsec_sys::sealed_file(name, data, program))
        .map_err(raised)?;
    Ok(file.into_raw_fd())
}

/// A detached overlay, for trying whether this host can make one.
#[pyfunction]
fn assemble(py: Python<'_>, layers: Vec<String>, writable: &str, user_fd: i32, base: u32) -> PyResult<i32> {
    let root = py
        .detach(|| dsec_launcher::assemble(&layers, writable, user_fd, base))
        .map_err(raised)?;
    Ok(root.into_raw_fd())
}

/// Pid, pidfd, seconds for the root file system, seconds for the process.
#[pyfunction]
fn launch(py: Python<'_>, cell: &[u8]) -> PyResult<(i32, i32, f64, f64)> {
    let cell: Cell = rmp_serde::from_slice(cell).map_err(|e| PyValueError::new_err(e.to_string()))?;
    let launched = py.detach(|| dsec_launcher::launch(&cell)).map_err(raised)?;
    Ok((
        launched.pid,
        launched.pidfd.into_raw_fd(),
        launched.rootfs.as_secs_f64(),
        launched.process.as_secs_f64(),
    ))
}

pub fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(make_namespaces, module)?)?;
    module.add_function(wrap_pyfunction!(assemble, module)?)?;
    module.add_function(wrap_pyfunction!(make_stage, module)?)?;
    module.add_function(wrap_pyfunction!(sealed_file, module)?)?;
    module.add_function(wrap_pyfunction!(launch, module)?)
}
