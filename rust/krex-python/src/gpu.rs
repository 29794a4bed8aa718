//! Which GPUs there are, and which one a user means.

use pyo3::prelude::*;

use crate::host::without_interpreter;

/// All GPUs, and parts of GPUs, that NVIDIA's management library lists: nvidia-smi's index, UUID,
/// and what it is called. It has no time limit.
#[pyfunction]
pub fn gpus(py: Python<'_>) -> PyResult<Vec<(u32, String, String)>> {
    let list = without_interpreter(py, |_| krex_nvml::list())?;
    Ok(list.into_iter().map(|it| (it.index, it.uuid, it.name)).collect())
}

/// The full name of the device that a user means.
#[pyfunction]
pub fn resolve_device(py: Python<'_>, device: &str) -> PyResult<String> {
    without_interpreter(py, |_| krex_nvml::resolve(device).map(Into::into))
}
