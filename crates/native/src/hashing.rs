//! Many hashes in one call: a call for each piece of a file would wait for the interpreter's lock each time.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sha2::{Digest, Sha256};

/// The SHA-256 of each of the pieces that lie one behind the other in `data`, 32 bytes each.
fn each(data: &[u8], lengths: &[usize]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(lengths.len().saturating_mul(32));
    let mut rest = data;
    for &length in lengths {
        let (piece, behind) = rest.split_at_checked(length)?;
        out.extend_from_slice(&Sha256::digest(piece));
        rest = behind;
    }
    rest.is_empty().then_some(out)
}

#[pyfunction]
#[pyo3(signature = (data, lengths))]
fn sha256_each<'py>(py: Python<'py>, data: &[u8], lengths: Vec<usize>) -> PyResult<Bound<'py, PyBytes>> {
    py.detach(|| each(data, &lengths))
        .map(|found| PyBytes::new(py, &found))
        .ok_or_else(|| PyValueError::new_err("the lengths are not those of the data"))
}

pub fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(sha256_each, module)?)
}
