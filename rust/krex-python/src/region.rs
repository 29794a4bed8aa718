//! Regions and their reports.

use std::borrow::Cow;
use std::sync::Mutex;

use krex_core::clock::seconds;
use krex_core::{region, report};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyAny, PyDict, PyList, PyModule, PyTuple};

use crate::convert;
use crate::host::{Interpreter, without_interpreter};
use crate::look;

/// A region that was entered.
#[pyclass(frozen, module = "krex._krex")]
pub struct Region {
    inner: Mutex<Option<region::Region>>,
    #[pyo3(get)]
    epoch: u64,
    #[pyo3(get)]
    joined: bool,
}

#[pymethods]
impl Region {
    /// Leaves the region. `None` if it was left before, or belongs to the process that forked
    /// this one.
    fn leave(&self, py: Python<'_>) -> Option<Report> {
        Some(Report::new(py, self.end(py)?.0, look::Findings::default()))
    }
}

impl Region {
    /// Leaves it. Also returns whether the GPU that it was about may be looked at.
    fn end(&self, py: Python<'_>) -> Option<(report::Report, bool)> {
        let region = self.take()?;
        Some(py.detach(|| {
            let report = region.leave(&Interpreter::default());
            (report, region.gpu_at_rest().is_some())
        }))
    }

    fn take(&self) -> Option<region::Region> {
        lock(&self.inner).take().filter(|region| !region.is_inherited())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Drop for Region {
    /// A region that is forgotten, in a generator that nobody finishes, say, ends with its object.
    fn drop(&mut self) {
        if let Some(region) = self.take() {
            region.leave(&Interpreter::default());
        }
    }
}

/// A region, and the look at its GPU before it.
struct Entered {
    region: Py<Region>,
    before: Option<Py<PyAny>>,
}

/// The native half of `krex.region.critical`. A signal handler of Python's can raise before the
/// first line of any Python function, also of an `__exit__`, which then would leave nothing; it
/// cannot in these.
#[pyclass(subclass, frozen, module = "krex._krex")]
pub struct Critical {
    options: region::Options,
    timeout: Option<f64>,
    max_hold: f64,
    drain_timeout: f64,
    entered: Mutex<Vec<Entered>>,
    report: Mutex<Option<Py<Report>>>,
}

#[pymethods]
impl Critical {
    #[new]
    #[pyo3(signature = (device=None, *, timeout=None, max_hold=60.0, drain_timeout=0.5, priority=0, label=None))]
    fn new(
        device: Option<Bound<'_, PyAny>>,
        timeout: Option<f64>,
        max_hold: f64,
        drain_timeout: f64,
        priority: i64,
        label: Option<String>,
    ) -> PyResult<Self> {
        let device = device.map(|it| device_name(&it)).transpose()?;
        let options = region::Options {
            device,
            timeout: convert::optional_duration("timeout", timeout)?,
            max_hold: convert::duration("max_hold", max_hold)?,
            drain_timeout: convert::duration("drain_timeout", drain_timeout)?,
            priority: i8::try_from(priority).map_err(|_| {
                PyValueError::new_err(format!("priority is {priority}; use -128 to 127"))
            })?,
            label: label.unwrap_or_default(),
        };
        let (entered, report) = (Mutex::new(Vec::new()), Mutex::new(None));
        Ok(Self { options, timeout, max_hold, drain_timeout, entered, report })
    }

    fn __enter__<'py>(slf: Bound<'py, Self>, py: Python<'py>) -> PyResult<Bound<'py, Self>> {
        let critical = slf.get();
        let options = critical.resolved(py)?;
        let before = look::before(py, &options)?;
        let entered = without_interpreter(py, |host| region::enter(host, &options))?;
        let (epoch, joined) = (entered.epoch(), entered.is_joined());
        let region = Region { epoch, joined, inner: Mutex::new(Some(entered)) };
        lock(&critical.entered).push(Entered { region: Py::new(py, region)?, before });
        if let Err(error) = call_all(py, "_entered_callbacks", slf.as_any()) {
            critical.leave(py)?;
            return Err(error);
        }
        Ok(slf)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        _kind: &Bound<'_, PyAny>,
        error: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let Some(report) = self.leave(py)? else { return Ok(()) };
        call_all(py, "_exited_callbacks", report.bind(py).as_any())?;
        if report.get().verdict == "revoked" && error.is_none() {
            let reason: String = report.get().reasons.bind(py).get_item(0)?.extract()?;
            let revoked = convert::new(py, "RegionRevoked", reason);
            revoked.value(py).setattr("report", report)?;
            return Err(revoked);
        }
        Ok(())
    }

    #[getter]
    fn report(&self, py: Python<'_>) -> PyResult<Py<Report>> {
        let report = lock(&self.report).as_ref().map(|report| report.clone_ref(py));
        report.ok_or_else(|| {
            let message = "the report exists once the region has ended: read it after the block";
            convert::new(py, "RegionError", message.to_owned())
        })
    }

    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        let inside = lock(&self.entered).last().map(|it| it.region.get().epoch);
        match inside {
            Some(epoch) => Ok(epoch),
            None => Ok(self.report(py)?.get().epoch),
        }
    }

    /// Whether the region that this is in runs within one that was held before.
    #[getter]
    fn joined(&self, py: Python<'_>) -> PyResult<bool> {
        let inside = lock(&self.entered).last().map(|it| it.region.get().joined);
        match inside {
            Some(joined) => Ok(joined),
            None => Ok(self.report(py)?.get().joined),
        }
    }

    #[getter]
    fn device(&self) -> Option<&str> {
        self.options.device.as_deref()
    }

    #[getter]
    fn timeout(&self) -> Option<f64> {
        self.timeout
    }

    #[getter]
    fn max_hold(&self) -> f64 {
        self.max_hold
    }

    #[getter]
    fn drain_timeout(&self) -> f64 {
        self.drain_timeout
    }

    #[getter]
    fn priority(&self) -> i8 {
        self.options.priority
    }

    #[getter]
    fn label(&self) -> Option<&str> {
        Some(self.options.label.as_str()).filter(|label| !label.is_empty())
    }
}

/// The name of a device; `@critical` without parentheses passes a function here.
fn device_name(device: &Bound<'_, PyAny>) -> PyResult<String> {
    let hint = if device.is_callable() { "; write `@critical()` to decorate" } else { "" };
    convert::device(device, hint)
}

impl Critical {
    /// The options, with the device by its full name.
    fn resolved(&self, py: Python<'_>) -> PyResult<Cow<'_, region::Options>> {
        let Some(device) = self.options.device.as_deref() else {
            return Ok(Cow::Borrowed(&self.options));
        };
        Ok(match without_interpreter(py, |_| krex_nvml::resolve(device))? {
            Cow::Borrowed(_) => Cow::Borrowed(&self.options),
            Cow::Owned(name) => {
                Cow::Owned(region::Options { device: Some(name), ..self.options.clone() })
            }
        })
    }

    fn leave(&self, py: Python<'_>) -> PyResult<Option<Py<Report>>> {
        let Some(Entered { region, before }) = lock(&self.entered).pop() else {
            let message = "the region was not entered".to_owned();
            return Err(convert::new(py, "RegionError", message));
        };
        let Some((mut report, at_rest)) = region.get().end(py) else { return Ok(None) };
        let looked = look::after(py, &mut report, at_rest, before);
        let (findings, interrupted) = match looked {
            Ok(findings) => (findings, None),
            Err(error) => (look::Findings::default(), Some(error)),
        };
        let report = Py::new(py, Report::new(py, report, findings))?;
        *lock(&self.report) = Some(report.clone_ref(py));
        interrupted.map_or(Ok(Some(report)), Err)
    }
}

/// Calls what is registered in a list of `krex.region`.
fn call_all(py: Python<'_>, list: &str, argument: &Bound<'_, PyAny>) -> PyResult<()> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || py.import("krex.region").map(Bound::unbind))?;
    let callbacks = module.bind(py).getattr(list)?.cast_into::<PyList>()?;
    if callbacks.is_empty() {
        return Ok(());
    }
    // A copy: a callback may take itself off the list.
    for callback in callbacks.iter().collect::<Vec<_>>() {
        callback.call1((argument,))?;
    }
    Ok(())
}

/// A tenant that shared the device with the region's holder.
#[pyclass(frozen, get_all, module = "krex._krex")]
pub struct Sibling {
    name: String,
    drained: &'static str,
    frozen: &'static str,
    submissions: u64,
}

#[pymethods]
impl Sibling {
    /// The same as a dictionary.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("name", &self.name)?;
        dict.set_item("drained", self.drained)?;
        dict.set_item("frozen", self.frozen)?;
        dict.set_item("submissions", self.submissions)?;
        Ok(dict)
    }

    fn __repr__(&self) -> String {
        format!(
            "Sibling(name={:?}, drained={:?}, frozen={:?}, submissions={})",
            self.name, self.drained, self.frozen, self.submissions
        )
    }
}

/// What happened in and around a region.
#[pyclass(frozen, get_all, module = "krex._krex")]
pub struct Report {
    device: String,
    epoch: u64,
    label: Option<String>,
    joined: bool,
    freezer: &'static str,
    wait_s: f64,
    drain_s: f64,
    freeze_s: f64,
    isolate_s: f64,
    cpus: Option<String>,
    isolation: &'static str,
    held_s: f64,
    restore_s: f64,
    time_excluded_s: f64,
    pending_at_exit_s: f64,
    submissions: u64,
    streams: u64,
    gpu: Option<String>,
    clocks: Option<Py<PyAny>>,
    siblings: Py<PyTuple>,
    verdict: &'static str,
    reasons: Py<PyTuple>,
}

impl Report {
    fn new(py: Python<'_>, report: report::Report, findings: look::Findings) -> Self {
        let siblings = report.siblings.into_iter().map(|it| Sibling {
            name: it.name,
            drained: it.drained.name(),
            frozen: it.frozen.name(),
            submissions: it.submissions,
        });
        let siblings: Vec<Sibling> = siblings.collect();
        let empty = || PyTuple::empty(py).unbind();
        Self {
            device: report.device,
            epoch: report.epoch,
            label: (!report.label.is_empty()).then_some(report.label),
            joined: report.joined,
            freezer: report.freezer,
            wait_s: seconds(report.wait),
            drain_s: seconds(report.drain),
            freeze_s: seconds(report.freeze),
            isolate_s: seconds(report.isolate),
            cpus: report.cpus,
            isolation: report.isolation,
            held_s: seconds(report.held),
            restore_s: seconds(report.restore),
            time_excluded_s: seconds(report.time_excluded),
            pending_at_exit_s: seconds(report.pending_at_exit),
            submissions: report.submissions,
            streams: report.streams,
            gpu: findings.gpu,
            clocks: findings.clocks,
            siblings: PyTuple::new(py, siblings).map_or_else(|_| empty(), Bound::unbind),
            verdict: report.verdict.name(),
            reasons: PyTuple::new(py, report.reasons).map_or_else(|_| empty(), Bound::unbind),
        }
    }
}

#[pymethods]
impl Report {
    /// The same as a dictionary that can be written as JSON.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("device", &self.device)?;
        dict.set_item("epoch", self.epoch)?;
        dict.set_item("label", &self.label)?;
        dict.set_item("joined", self.joined)?;
        dict.set_item("freezer", self.freezer)?;
        dict.set_item("wait_s", self.wait_s)?;
        dict.set_item("drain_s", self.drain_s)?;
        dict.set_item("freeze_s", self.freeze_s)?;
        dict.set_item("isolate_s", self.isolate_s)?;
        dict.set_item("cpus", &self.cpus)?;
        dict.set_item("isolation", self.isolation)?;
        dict.set_item("held_s", self.held_s)?;
        dict.set_item("restore_s", self.restore_s)?;
        dict.set_item("time_excluded_s", self.time_excluded_s)?;
        dict.set_item("pending_at_exit_s", self.pending_at_exit_s)?;
        dict.set_item("submissions", self.submissions)?;
        dict.set_item("streams", self.streams)?;
        dict.set_item("gpu", &self.gpu)?;
        dict.set_item("clocks", &self.clocks)?;
        let siblings: Vec<Bound<'py, PyDict>> = self
            .siblings
            .bind(py)
            .iter()
            .map(|it| it.cast::<Sibling>()?.get().to_dict(py))
            .collect::<PyResult<_>>()?;
        dict.set_item("siblings", siblings)?;
        dict.set_item("verdict", self.verdict)?;
        dict.set_item("reasons", self.reasons.bind(py).to_list())?;
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        format!(
            "Report(device={:?}, epoch={}, verdict={:?}, held_s={:.6}, siblings={}, reasons={})",
            self.device,
            self.epoch,
            self.verdict,
            self.held_s,
            self.siblings.bind(py).len(),
            self.reasons.bind(py),
        )
    }
}
