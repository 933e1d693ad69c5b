//! Mounting by path.

use pyo3::prelude::*;

use crate::error::raised;

#[pyfunction]
#[pyo3(signature = (meta, data, target))]
fn mount_erofs(py: Python<'_>, meta: &str, data: Option<&str>, target: &str) -> PyResult<()> {
    py.detach(|| dsec_sys::mount_erofs(meta, data, target)).map_err(raised)
}

#[pyfunction]
#[pyo3(signature = (target, lazy))]
fn umount(py: Python<'_>, target: &str, lazy: bool) -> PyResult<()> {
    py.detach(|| dsec_sys::umount(target, lazy)).map_err(raised)
}

#[pyfunction]
#[pyo3(signature = (source, target, fstype, flags, data))]
fn mount(py: Python<'_>, source: &str, target: &str, fstype: &str, flags: u64, data: &str) -> PyResult<()> {
    py.detach(|| dsec_sys::mount(source, target, fstype, flags, data))
        .map_err(raised)
}

pub fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(mount_erofs, module)?)?;
    module.add_function(wrap_pyfunction!(umount, module)?)?;
    module.add_function(wrap_pyfunction!(mount, module)?)
}
