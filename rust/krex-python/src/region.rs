//! Regions and their reports.

use std::sync::Mutex;

use krex_core::clock::seconds;
use krex_core::{region, report};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::convert;
use crate::host::{Interpreter, without_interpreter};

/// A region that was entered.
#[pyclass(frozen, module = "krex._krex")]
pub struct Region {
    inner: Mutex<Option<region::Region>>,
    #[pyo3(get)]
    epoch: u64,
    #[pyo3(get)]
    joined: bool,
}

/// Enters a region; see `krex.region.critical`.
#[pyfunction]
#[pyo3(signature = (device, timeout, max_hold, drain_timeout, priority, label))]
pub fn enter(
    py: Python<'_>,
    device: Option<String>,
    timeout: Option<f64>,
    max_hold: f64,
    drain_timeout: f64,
    priority: i64,
    label: Option<String>,
) -> PyResult<Region> {
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
    let entered = without_interpreter(py, |host| region::enter(host, &options))?;
    Ok(Region {
        epoch: entered.epoch(),
        joined: entered.is_joined(),
        inner: Mutex::new(Some(entered)),
    })
}

#[pymethods]
impl Region {
    /// Leaves the region. `None` if it was left before, or belongs to the process that forked
    /// this one.
    fn leave(&self, py: Python<'_>) -> Option<Report> {
        let region = self.take()?;
        let report = py.detach(|| region.leave(&Interpreter::default()));
        Some(Report::new(py, report))
    }
}

impl Region {
    fn take(&self) -> Option<region::Region> {
        let mut inner = self.inner.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        inner.take().filter(|region| !region.is_inherited())
    }
}

impl Drop for Region {
    /// A region that is forgotten, in a generator that nobody finishes, say, ends with its object.
    fn drop(&mut self) {
        if let Some(region) = self.take() {
            region.leave(&Interpreter::default());
        }
    }
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
    held_s: f64,
    restore_s: f64,
    time_excluded_s: f64,
    siblings: Py<PyTuple>,
    verdict: &'static str,
    reasons: Py<PyTuple>,
}

impl Report {
    fn new(py: Python<'_>, report: report::Report) -> Self {
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
            held_s: seconds(report.held),
            restore_s: seconds(report.restore),
            time_excluded_s: seconds(report.time_excluded),
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
        dict.set_item("held_s", self.held_s)?;
        dict.set_item("restore_s", self.restore_s)?;
        dict.set_item("time_excluded_s", self.time_excluded_s)?;
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
