//! The gate and the counter, for those who gate something of their own.

use std::sync::Mutex;

use krex_core::client::Client;
use krex_core::device::{GATE_PREFIX, check_gate_name, find_or_add};
use krex_core::word::{GateWord, Phase};
use pyo3::prelude::*;

use crate::convert;
use crate::host::without_interpreter;
use crate::submission;

/// Attaches, and finds the section of the gate called `name`.
fn section(py: Python<'_>, name: &str) -> PyResult<(&'static Client, usize)> {
    check_gate_name(name).map_err(|error| convert::error(py, error))?;
    let client = without_interpreter(py, |host| {
        let client = Client::attach(host)?;
        client.be_own_tenant(host)?;
        Ok(client)
    })?;
    let section = find_or_add(&client.segment, &format!("{GATE_PREFIX}{name}"));
    Ok((client, section.map_err(|error| convert::error(py, error))?))
}

/// A gate in shared memory, without any of the other steps of a region.
#[pyclass(frozen, module = "krex._krex")]
pub struct SharedMemoryGate {
    #[pyo3(get)]
    name: String,
    /// The word of our claim.
    claim: Mutex<Option<GateWord>>,
}

#[pymethods]
impl SharedMemoryGate {
    #[new]
    fn new(py: Python<'_>, name: String) -> PyResult<Self> {
        section(py, &name)?;
        Ok(Self { name, claim: Mutex::new(None) })
    }

    /// Closes the gate, if it is open. Returns the epoch of the claim, or `None`.
    fn try_claim(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let (client, section) = section(py, &self.name)?;
        let gate = client.gate(section);
        let Some(granted) = gate.try_grant(client.reference().slot) else {
            return Ok(None);
        };
        let Ok(held) = gate.advance(granted, Phase::Held) else {
            return Ok(None);
        };
        *self.claim() = Some(held);
        Ok(Some(held.tenure()))
    }

    /// Opens the gate again.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let (client, section) = section(py, &self.name)?;
        let Some(word) = self.claim().take() else {
            let message = format!("the gate {:?} is not held through this object", self.name);
            return Err(convert::new(py, "RegionError", message));
        };
        if word.holder() != client.reference().slot || client.gate(section).open(word).is_err() {
            let message = format!("the claim on {:?} (epoch {}) is over", self.name, word.tenure());
            return Err(convert::new(py, "RegionRevoked", message));
        }
        Ok(())
    }

    /// Whether another tenant holds the gate.
    #[getter]
    fn is_held_by_other(&self, py: Python<'_>) -> PyResult<bool> {
        let (client, section) = section(py, &self.name)?;
        let word = client.gate(section).load();
        Ok(!word.is_open() && !client.may_pass(word))
    }

    /// The number of the current, or else the last, claim; it only grows.
    #[getter]
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        let (client, section) = section(py, &self.name)?;
        Ok(client.gate(section).load().tenure())
    }
}

impl Drop for SharedMemoryGate {
    /// A claim that is forgotten ends with its object.
    fn drop(&mut self) {
        let claim = self.claim().take();
        if let (Some(word), Some(client)) = (claim, Client::attached())
            && word.holder() == client.reference().slot
            && let Ok(section) =
                find_or_add(&client.segment, &format!("{GATE_PREFIX}{}", self.name))
        {
            // It fails only if the claim is over.
            let _ = client.gate(section).open(word);
        }
    }
}

impl SharedMemoryGate {
    fn claim(&self) -> std::sync::MutexGuard<'_, Option<GateWord>> {
        self.claim.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Counts what is in flight behind a [`SharedMemoryGate`], over all processes.
#[pyclass(frozen, module = "krex._krex")]
pub struct InFlightCounter {
    #[pyo3(get)]
    name: String,
}

#[pymethods]
impl InFlightCounter {
    #[new]
    fn new(py: Python<'_>, name: String) -> PyResult<Self> {
        section(py, &name)?;
        Ok(Self { name })
    }

    /// Passes the gate and counts one more; waits while another tenant holds the gate.
    #[pyo3(signature = (timeout=None))]
    fn enter(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let timeout = convert::optional_duration("timeout", timeout)?;
        let (client, section) = section(py, &self.name)?;
        submission::enter(py, client, section, timeout)
    }

    /// Counts one less.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let (client, section) = section(py, &self.name)?;
        let host = crate::host::Interpreter::default();
        let flight = client.flight(section, &host).map_err(|error| convert::error(py, error))?;
        if flight.counts().in_flight == 0 {
            let message = format!("nothing of this process is in flight at {:?}", self.name);
            return Err(convert::new(py, "RegionError", message));
        }
        client.leave_submission(section);
        Ok(())
    }

    /// How many are in flight now, over all processes.
    #[getter]
    fn count(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.sum(py)?.0)
    }

    /// How many were admitted so far by processes that still run.
    #[getter]
    fn total(&self, py: Python<'_>) -> PyResult<u64> {
        let (in_flight, completed) = self.sum(py)?;
        Ok(in_flight + completed)
    }
}

impl InFlightCounter {
    fn sum(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let (client, section) = section(py, &self.name)?;
        let submitters = client.segment.live_submitters.iter();
        Ok(submitters
            .map(|slot| &client.segment.submitters[slot])
            .filter(|it| it.device.load(std::sync::atomic::Ordering::Relaxed) == section as u64)
            .map(|it| it.flight().counts())
            .fold((0, 0), |sum, it| (sum.0 + it.in_flight, sum.1 + it.completed)))
    }
}
