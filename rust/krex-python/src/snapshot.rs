//! What `krex status` shows, and what `krex recover` does.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use krex_core::clock::{self, seconds};
use krex_core::device::{GATE_PREFIX, in_use, with_regions};
use krex_core::drain::coverage;
use krex_core::freezer::Kind;
use krex_core::layout::{Activity, Tenant};
use krex_core::segment::{Segment, runtime_dir};
use krex_core::word::{OwnerWord, Phase, Reference, SlotState};
use krex_core::{recover as repair, reservation, tenant};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::convert;
use crate::host::without_interpreter;

/// The state of everything in a runtime directory, as JSON-like data. Makes nothing.
#[pyfunction]
#[pyo3(signature = (runtime_dir=None))]
pub fn snapshot(py: Python<'_>, runtime_dir: Option<PathBuf>) -> PyResult<Bound<'_, PyDict>> {
    let failed = |error| convert::error(py, error);
    let directory = match runtime_dir {
        Some(directory) => directory,
        None => self::runtime_dir().map_err(failed)?,
    };
    let dict = PyDict::new(py);
    dict.set_item("runtime_dir", directory.display().to_string())?;
    let Some(segment) = Segment::open(&directory).map_err(failed)? else {
        dict.set_item("layout", py.None())?;
        dict.set_item("version", py.None())?;
        for key in ["devices", "tenants", "supervisors"] {
            dict.set_item(key, PyList::empty(py))?;
        }
        return Ok(dict);
    };
    dict.set_item("layout", segment.header.layout.load(Ordering::Relaxed))?;
    dict.set_item("version", segment.header.version.get())?;
    dict.set_item("devices", devices(py, &segment)?)?;
    dict.set_item("tenants", tenants(py, &segment)?)?;
    dict.set_item("supervisors", supervisors(py, &segment)?)?;
    Ok(dict)
}

fn live(segment: &Segment) -> impl Iterator<Item = (usize, OwnerWord, &Tenant)> {
    segment
        .live_tenants
        .iter()
        .map(|slot| (slot, segment.tenants[slot].owner(), &segment.tenants[slot]))
        .filter(|(_, owner, _)| owner.state() == SlotState::Live)
}

fn devices<'py>(py: Python<'py>, segment: &Segment) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let now = clock::now();
    let mut list = Vec::new();
    for index in in_use(segment) {
        let section = &segment.devices[index];
        let word = section.gate().load();
        let closed = !word.is_open();
        let holder = closed.then(|| segment.tenants.get(word.holder())).flatten();
        let holding = holder.map(|it| &it.holding);
        let since = holding.map_or(now, |it| it.granted_at.load(Ordering::Acquire));
        let is_region = closed && !section.name.get().starts_with(GATE_PREFIX);
        let mut queue: Vec<_> = live(segment)
            .filter_map(|(_, _, it)| Some((it.queue.key_for(index)?, it.name.get())))
            .collect();
        queue.sort();
        let dict = PyDict::new(py);
        dict.set_item("name", section.name.get())?;
        dict.set_item("phase", word.phase().name())?;
        dict.set_item("epoch", word.tenure())?;
        dict.set_item("holder", holder.map(|it| it.name.get()))?;
        let label = holding.map(|it| it.label.get()).unwrap_or_default();
        dict.set_item("label", (is_region && !label.is_empty()).then_some(label))?;
        dict.set_item("held_s", is_region.then(|| seconds(now.saturating_sub(since))))?;
        let reserved = reservation::of(segment, index).map(|(_, it)| it.cpus.to_string());
        dict.set_item("cpus", reserved)?;
        dict.set_item("queue", queue.into_iter().map(|it| it.1).collect::<Vec<_>>())?;
        list.push(dict);
    }
    Ok(list)
}

fn tenants<'py>(py: Python<'py>, segment: &Segment) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let now = clock::now();
    let mut list = Vec::new();
    for (slot, owner, it) in live(segment) {
        let activity = Activity::from_word(it.activity.load(Ordering::Relaxed)).name();
        let holds = with_regions(segment).any(|index| {
            let word = segment.devices[index].gate().load();
            matches!(word.phase(), Phase::Held | Phase::Leaving) && word.holder() == slot
        });
        let frozen_since = it.frozen_since.load(Ordering::Acquire);
        let is_frozen = frozen_since != 0;
        let state = match (holds, is_frozen) {
            (true, _) => "in_critical_region",
            (false, true) => "frozen",
            (false, false) => activity,
        };
        let shared = in_use(segment).filter(|index| it.shares(*index));
        let parent = it.parent().and_then(|parent| tenant::resolve(segment, parent));
        let dict = PyDict::new(py);
        dict.set_item("name", it.name.get())?;
        dict.set_item("pid", owner.pid())?;
        dict.set_item("state", state)?;
        dict.set_item("phase", activity)?;
        let names: Vec<_> = shared.map(|index| segment.devices[index].name.get()).collect();
        dict.set_item("devices", names)?;
        dict.set_item("frozen", is_frozen)?;
        let frozen = is_frozen.then(|| seconds(now.saturating_sub(frozen_since)));
        dict.set_item("frozen_s", frozen)?;
        let freezer = Kind::from_word(it.freezer.load(Ordering::Relaxed));
        dict.set_item("freezer", freezer.name())?;
        dict.set_item("waiting", it.waiting_threads.load(Ordering::Acquire) > 0)?;
        dict.set_item("excluded_s", seconds(it.time_excluded(now)))?;
        let age = now.saturating_sub(it.registered_at.load(Ordering::Relaxed));
        dict.set_item("age_s", seconds(age))?;
        dict.set_item("parent", parent.map(|it| it.name.get()))?;
        dict.set_item("supervisor", owner.supervisor())?;
        let reference = Reference { slot, generation: owner.generation() };
        dict.set_item("submitters", submitters(py, segment, reference)?)?;
        list.push(dict);
    }
    Ok(list)
}

/// Who of a tenant submits to what, and how much of it krex sees.
fn submitters<'py>(
    py: Python<'py>,
    segment: &Segment,
    tenant: Reference,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let mut list = Vec::new();
    for it in segment.live_submitters.iter().map(|slot| &segment.submitters[slot]) {
        let device = segment.devices.get(it.device.load(Ordering::Relaxed) as usize);
        let Some(device) = device.filter(|_| it.tenant() == Some(tenant)) else { continue };
        let dict = PyDict::new(py);
        dict.set_item("pid", it.owner().pid())?;
        dict.set_item("device", device.name.get())?;
        dict.set_item("submissions", it.flight().counts().completed)?;
        dict.set_item("births", it.births().counts().completed)?;
        dict.set_item("in_flight", it.in_flight())?;
        dict.set_item("drains", it.covers(coverage::DRAINS))?;
        dict.set_item("fully_gated", !it.covers(coverage::INCOMPLETE))?;
        list.push(dict);
    }
    Ok(list)
}

fn supervisors<'py>(py: Python<'py>, segment: &Segment) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let mut list = Vec::new();
    for (slot, it) in segment.supervisors.iter().enumerate() {
        if it.key.load(Ordering::Acquire) == 0 {
            continue;
        }
        let is_alive = segment.is_supervisor_alive(slot);
        let tenants = live(segment).filter(|(_, owner, _)| owner.supervisor() == slot).count();
        let dict = PyDict::new(py);
        dict.set_item("slot", slot)?;
        dict.set_item("pid", it.keeper.load(Ordering::Acquire))?;
        dict.set_item("worker_pid", it.worker.load(Ordering::Acquire))?;
        dict.set_item("alive", is_alive)?;
        dict.set_item("tenants", tenants)?;
        list.push(dict);
    }
    Ok(list)
}

/// What a device would have reserved if this process were the first to use it, with this value of
/// `KREX_RESERVED_CPUS`: the CPUs as a list, empty for none; why; and whether nobody else would
/// have a CPU left.
#[pyfunction]
#[pyo3(signature = (device, setting=None))]
pub fn planned_reservation(
    py: Python<'_>,
    device: &str,
    setting: Option<OsString>,
) -> PyResult<(String, String, bool)> {
    let plan = reservation::plan(device, setting.as_deref());
    let plan = plan.map_err(|error| convert::error(py, error))?;
    Ok((plan.cpus.to_string(), plan.reason, plan.leaves_none))
}

/// How the names of the cgroups of a runtime directory begin.
#[pyfunction]
pub fn group_prefix(runtime_dir: PathBuf) -> String {
    tenant::group_prefix(&runtime_dir)
}

/// Repairs by hand what supervisors could not, or takes krex out of use. Returns what was done.
#[pyfunction]
#[pyo3(signature = (purge=false))]
pub fn recover(py: Python<'_>, purge: bool) -> PyResult<Vec<String>> {
    without_interpreter(py, |host| {
        let directory = runtime_dir()?;
        if purge { repair::purge(&directory) } else { repair::recover(&directory, host) }
    })
}
