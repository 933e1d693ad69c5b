//! The btrfs pool and the loop device under it.

use std::os::fd::IntoRawFd;

use pyo3::prelude::*;

use crate::error::raised;

#[pyfunction]
fn loop_attach(py: Python<'_>, path: &str, fresh: bool) -> PyResult<(String, i32)> {
    let (name, fd) = py.detach(|| dsec_sys::loop_attach(path, fresh)).map_err(raised)?;
    Ok((name, fd.into_raw_fd()))
}

#[pyfunction]
fn subvolume_create(py: Python<'_>, parent: &str, name: &str) -> PyResult<()> {
    py.detach(|| dsec_sys::subvolume_create(parent, name)).map_err(raised)
}

#[pyfunction]
fn subvolume_snapshot(py: Python<'_>, source: &str, parent: &str, name: &str, read_only: bool) -> PyResult<()> {
    py.detach(|| dsec_sys::subvolume_snapshot(source, parent, name, read_only))
        .map_err(raised)
}

#[pyfunction]
fn subvolume_delete(py: Python<'_>, parent: &str, name: &str) -> PyResult<()> {
    py.detach(|| dsec_sys::subvolume_delete(parent, name)).map_err(raised)
}

#[pyfunction]
fn subvolume_limit(py: Python<'_>, path: &str, size: u64) -> PyResult<()> {
    py.detach(|| dsec_sys::subvolume_limit(path, size)).map_err(raised)
}

#[pyfunction]
fn subvolume_id(py: Python<'_>, path: &str) -> PyResult<u64> {
    py.detach(|| dsec_sys::subvolume_id(path)).map_err(raised)
}

#[pyfunction]
fn filesystem_id(py: Python<'_>, path: &str) -> PyResult<String> {
    py.detach(|| dsec_sys::filesystem_id(path)).map_err(raised)
}

#[pyfunction]
fn quota_enable_simple(py: Python<'_>, path: &str) -> PyResult<()> {
    py.detach(|| dsec_sys::quota_enable_simple(path)).map_err(raised)
}

pub fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(loop_attach, module)?)?;
    module.add_function(wrap_pyfunction!(subvolume_create, module)?)?;
    module.add_function(wrap_pyfunction!(subvolume_snapshot, module)?)?;
    module.add_function(wrap_pyfunction!(subvolume_delete, module)?)?;
    module.add_function(wrap_pyfunction!(subvolume_limit, module)?)?;
    module.add_function(wrap_pyfunction!(subvolume_id, module)?)?;
    module.add_function(wrap_pyfunction!(filesystem_id, module)?)?;
    module.add_function(wrap_pyfunction!(quota_enable_simple, module)?)
}
