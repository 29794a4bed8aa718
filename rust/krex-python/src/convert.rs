//! One conversion of errors, one of times.

use std::time::Duration;

use krex_core::error::Error;
use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBool;

/// The Python exception for an error of the core; its class is in `krex.errors`.
pub fn error(py: Python<'_>, error: Error) -> PyErr {
    let class = match &error {
        Error::Invalid(message) => return PyValueError::new_err(message.clone()),
        Error::System { source, .. } if source.raw_os_error().is_some() => {
            let number = source.raw_os_error();
            return PyOSError::new_err((number, error.to_string()));
        }
        Error::UnknownDevice(_) | Error::NoSuchGpu { .. } => "UnknownDevice",
        Error::Segment { .. } => "SegmentError",
        Error::Timeout { .. } => "RegionTimeout",
        Error::Revoked { .. } => "RegionRevoked",
        Error::Misuse(_) => "RegionError",
        _ => "KrexError",
    };
    new(py, class, error.to_string())
}

/// An exception of `krex.errors`.
pub fn new(py: Python<'_>, class: &str, message: String) -> PyErr {
    let class = py.import("krex.errors").and_then(|module| module.getattr(class));
    match class.and_then(|class| class.call1((message,))) {
        Ok(instance) => PyErr::from_value(instance),
        Err(error) => error,
    }
}

/// A positive, finite number of seconds.
pub fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    if seconds > 0.0
        && let Ok(duration) = Duration::try_from_secs_f64(seconds)
    {
        return Ok(duration);
    }
    Err(PyValueError::new_err(format!("{name} is {seconds}; use a positive number of seconds")))
}

/// The same, where `None` means "no limit".
pub fn optional_duration(name: &str, seconds: Option<f64>) -> PyResult<Option<Duration>> {
    seconds.map(|seconds| duration(name, seconds)).transpose()
}

/// What a user calls a device: a string, or a GPU's index as a number. `hint` says more to
/// somebody who wrote something else.
pub fn device(device: &Bound<'_, PyAny>, hint: &str) -> PyResult<String> {
    // A bool is an int to Python, but no index.
    if let Ok(index) = device.extract::<u32>()
        && !device.is_instance_of::<PyBool>()
    {
        return Ok(index.to_string());
    }
    device.extract().map_err(|_| {
        PyTypeError::new_err(format!(
            "device is {device:?}; use a string, a GPU's index, or None{hint}"
        ))
    })
}
