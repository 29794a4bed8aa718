//! What `krex bench gate` measures without the interpreter in between.

use std::collections::BTreeMap;

use krex_core::flight::Flight;
use krex_core::gate::Gate;
use krex_core::measure::{Lane, Pair};
use krex_core::sync::AtomicU64;
use pyo3::prelude::*;

/// Nanoseconds of CPU time per pair of entering and leaving, about `passes` of each kind, by name.
/// The gate is one of its own, which nobody closes.
#[pyfunction]
pub fn time_open_gate(py: Python<'_>, passes: u32) -> PyResult<BTreeMap<&'static str, f64>> {
    py.detach(|| {
        let (gate, flight, floor) = (Gate::default(), Flight::default(), AtomicU64::new(0));
        let lane = Lane::new(&gate, &flight, &floor)?;
        Ok(Pair::ALL.into_iter().map(|pair| (pair.name(), lane.time(pair, passes))).collect())
    })
}
