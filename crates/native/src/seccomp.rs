//! The seccomp program of commands, compiled from schema/seccomp.toml.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The program as an array of struct sock_filter, for the `filter` of aether's boot record.
#[pyfunction]
fn seccomp_program(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    let program = py.detach(|| dsec_seccomp::compile(dsec_seccomp::PLATFORM));
    let program = program.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(PyBytes::new(py, &program))
}

pub fn export(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(seccomp_program, module)?)
}
