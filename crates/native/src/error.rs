//! Kernel errors as OSError(errno, operation, path): kernel/errors.py gives them their name.

use pyo3::exceptions::PyOSError;
use pyo3::PyErr;

pub fn raised(error: dsec_sys::Error) -> PyErr {
    PyOSError::new_err((error.errno, error.op, error.path))
}
