//! Submissions that pass the gate and are counted, and what a command says that it does.

use std::sync::atomic::{AtomicUsize, Ordering};

use krex_core::client::Client;
use krex_core::clock::Deadline;
use krex_core::layout::{Activity, DEVICES};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyAny;

use crate::convert;
use crate::host::{Interpreter, without_interpreter};

const UNKNOWN: usize = usize::MAX;

/// A context manager that passes the device's gate and counts in flight.
#[pyclass(frozen, module = "krex._krex")]
pub struct Submission {
    device: Option<String>,
    timeout: Option<std::time::Duration>,
    /// The device's section, once known, with the client for which it is.
    section: AtomicUsize,
    client: AtomicUsize,
    depth: AtomicUsize,
}

#[pymethods]
impl Submission {
    #[new]
    #[pyo3(signature = (device=None, timeout=None))]
    fn new(device: Option<Bound<'_, PyAny>>, timeout: Option<f64>) -> PyResult<Self> {
        Ok(Self {
            device: device.map(|it| convert::device(&it, "")).transpose()?,
            timeout: convert::optional_duration("timeout", timeout)?,
            section: AtomicUsize::new(UNKNOWN),
            client: AtomicUsize::new(0),
            depth: AtomicUsize::new(0),
        })
    }

    fn __enter__<'py>(slf: Bound<'py, Self>, py: Python<'py>) -> PyResult<Bound<'py, Self>> {
        slf.get().enter(py)?;
        Ok(slf)
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        self.leave()
    }
}

impl Submission {
    pub fn on_section(section: usize, client: &'static Client) -> Self {
        Self {
            device: None,
            timeout: None,
            section: AtomicUsize::new(section),
            client: AtomicUsize::new(std::ptr::from_ref(client).addr()),
            depth: AtomicUsize::new(0),
        }
    }

    fn enter(&self, py: Python<'_>) -> PyResult<()> {
        let client = match Client::attached() {
            Some(client) => client,
            None => without_interpreter(py, |host| Client::attach(host))?,
        };
        let address = std::ptr::from_ref(client).addr();
        // Relaxed: both are only ever set together by threads that hold the same client.
        if self.client.load(Ordering::Relaxed) != address {
            let section = without_interpreter(py, |_| {
                let device = self.device.as_deref().map(krex_nvml::resolve).transpose()?;
                client.device(device.as_deref())
            })?;
            client.share(section);
            self.section.store(section, Ordering::Relaxed);
            self.client.store(address, Ordering::Relaxed);
            self.depth.store(0, Ordering::Relaxed);
        }
        let section = self.section.load(Ordering::Relaxed);
        enter(py, client, section, self.timeout)?;
        self.depth.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn leave(&self) -> PyResult<()> {
        let section = self.section.load(Ordering::Relaxed);
        let Some(client) = Client::attached().filter(|client| {
            std::ptr::from_ref(*client).addr() == self.client.load(Ordering::Relaxed)
        }) else {
            return Ok(()); // A forked child leaves what its parent entered; or krex was purged.
        };
        let deeper = |depth: usize| depth.checked_sub(1);
        if self.depth.fetch_update(Ordering::Relaxed, Ordering::Relaxed, deeper).is_err() {
            return Err(PyRuntimeError::new_err("the submission was not entered"));
        }
        client.leave_submission(section.min(DEVICES - 1));
        Ok(())
    }
}

/// Passes the gate of a section, without the interpreter if it has to wait.
pub fn enter(
    py: Python<'_>,
    client: &'static Client,
    section: usize,
    timeout: Option<std::time::Duration>,
) -> PyResult<()> {
    // The open gate is the usual case, and quicker than letting go of the interpreter.
    let host = Interpreter::default();
    let flight = client.flight(section, &host).map_err(|error| convert::error(py, error))?;
    if flight.try_enter_quickly(client.gate(section)) {
        return Ok(());
    }
    without_interpreter(py, |host| {
        let deadline = timeout.map_or(Deadline::NEVER, Deadline::after);
        client.enter_submission(section, deadline, host)
    })
}

/// Says what this command is doing: `idle`, `compiling` or `warming_up`. Returns what it said
/// before.
#[pyfunction]
pub fn set_activity(py: Python<'_>, name: &str) -> PyResult<&'static str> {
    let Some(activity) = Activity::ALL.into_iter().find(|it| it.name() == name) else {
        return Err(PyValueError::new_err(format!(
            "unknown phase {name:?}; use idle, compiling or warming_up"
        )));
    };
    let client = without_interpreter(py, |host| Client::attach(host))?;
    // Relaxed: nothing depends on it but what people are shown.
    let before = client.tenant().activity.swap(activity as u64, Ordering::Relaxed);
    Ok(Activity::from_word(before).name())
}
