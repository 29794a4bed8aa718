//! Looks at a GPU before and after a region, through `krex.nvml`: what is done there is Python's,
//! since NVIDIA's own binding is. Here it is decided when, and what that does to the report.

use krex_core::client::Client;
use krex_core::report::{Report, Verdict};
use krex_core::{device, region};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyModule;

use crate::convert;
use crate::host::without_interpreter;

/// What the report says of the GPU.
#[derive(Default)]
pub struct Findings {
    pub gpu: Option<String>,
    pub clocks: Option<Py<PyAny>>,
}

fn module(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("krex.nvml").map(Bound::unbind))?;
    Ok(module.bind(py))
}

/// The look before a region, and before its claim. `None`: it is not about a GPU, or somebody is in
/// a region there.
pub fn before(py: Python<'_>, options: &region::Options) -> PyResult<Option<Py<PyAny>>> {
    if options.device.as_deref().is_some_and(|it| !device::is_gpu(it)) {
        return Ok(None);
    }
    let gpu = without_interpreter(py, |host| region::gpu_at_rest(host, options))?;
    gpu.map(|gpu| Ok(module(py)?.call_method1("_look", (gpu,))?.unbind())).transpose()
}

/// The look after its end, and what both of them say.
pub fn after(
    py: Python<'_>,
    report: &mut Report,
    at_rest: bool,
    before: Option<Py<PyAny>>,
) -> PyResult<Findings> {
    if report.joined || !device::is_gpu(&report.device) {
        return Ok(Findings::default());
    }
    let module = module(py)?;
    let after = match at_rest {
        true => Some(module.call_method1("_look", (&report.device,))?),
        false => None,
    };
    let judged = module.call_method1("_judge", (&report.device, before, after))?;
    let (gpu, clocks, problems): (_, Option<Py<PyAny>>, Vec<(String, String)>) =
        judged.extract()?;
    for (verdict, reason) in problems {
        report.add(Verdict::named(&verdict).unwrap_or(Verdict::Unknown), reason);
    }
    Ok(Findings { gpu, clocks })
}

/// What the processes on a GPU say about a region: a verdict and a reason, or nothing.
#[pyfunction]
pub fn strangers(
    py: Python<'_>,
    gpu: &str,
    pids: Vec<i32>,
) -> PyResult<Option<(&'static str, String)>> {
    let judged = py.detach(|| {
        let Some(client) = Client::attached() else { return Ok(None) };
        let device = client.device(Some(gpu))?;
        Ok(krex_core::strangers::judge(client, device, &pids))
    });
    let judged = judged.map_err(|error| convert::error(py, error))?;
    Ok(judged.map(|(verdict, reason)| (verdict.name(), reason)))
}
