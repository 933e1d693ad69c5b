//! The EROFS writer, given its entries as msgpack: one array an entry, in the order of `dsec_erofs::Entry`.

use dsec_erofs::{build, Entry, Options};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::raised;

#[pyfunction]
#[pyo3(signature = (entries, uuid, data_blocks))]
fn erofs_image<'py>(
    py: Python<'py>,
    entries: &[u8],
    uuid: [u8; 16],
    data_blocks: u64,
) -> PyResult<Bound<'py, PyBytes>> {
    let image = py.detach(|| {
        let list: Vec<Entry> = rmp_serde::from_slice(entries).map_err(|e| format!("entries: {e}"))?;
        build(&list, &Options { uuid, data_blocks }).map_err(|e| e.to_string())
    });
    image
        .map(|bytes| PyBytes::new(py, &bytes))
        .map_err(PyValueError::new_err)
}

#[pyfunction]
#[pyo3(signature = (path))]
fn cached_bytes(py: Python<'_>, path: &str) -> PyResult<u64> {
    py.detach(|| dsec_sys::cached_bytes(path)).map_err(raised)
}

pub fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(erofs_image, module)?)?;
    module.add_function(wrap_pyfunction!(cached_bytes, module)?)
}
