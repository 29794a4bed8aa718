//! Which CPUs are kept for a device's regions (for step 6, `isolate.rs`).
//!
//! The first command that wants any decides, through one word of the device's section, for as long
//! as there are commands. The CPUs themselves stand in records that never change once they are
//! complete; records are shared by all devices with the same reservation.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::affinity::{self, CpuSet};
use crate::device;
use crate::error::{Error, Result};
use crate::layout::{Layout, RESERVATIONS};
use crate::recover::ring_for;
use crate::topology::{self, Core, SYSTEM};
use crate::word::{Allotment, SlotState};

/// The setting: CPUs as taskset writes them; empty or `none` for none.
pub const SETTING: &str = "KREX_RESERVED_CPUS";

/// So many cores a device gets by default, on machines with more than [`SMALL_MACHINE`] cores.
const CORES_PER_DEVICE: usize = 2;
const SMALL_MACHINE: usize = 4;

/// A reservation: the CPUs of a device's regions, and who of the holder goes where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Reservation {
    /// Where the holder runs.
    pub cpus: CpuSet,
    /// Where nobody else does: those, and hyperthreads that share a core with them.
    pub off: CpuSet,
    pub places: Places,
}

/// The masks that the holder's threads carry inside a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Places {
    /// The thread that entered.
    pub caller: CpuSet,
    /// All others.
    pub others: CpuSet,
}

impl Places {
    /// The calling thread gets a CPU of its own, and a core if there is more than one.
    fn of(cpus: &CpuSet, cores: &[Core]) -> Self {
        let caller: CpuSet = cpus.first().into_iter().collect();
        let core = cores.iter().find(|core| core.cpus.meets(&caller)).map_or(caller, |it| it.cpus);
        let on_other_cores = cpus.without(&core);
        let on_other_cpus = cpus.without(&caller);
        let others = [on_other_cores, on_other_cpus].into_iter().find(|it| !it.is_empty());
        Self { caller, others: others.unwrap_or(caller) }
    }

    pub fn include(&self, mask: &CpuSet) -> bool {
        *mask == self.caller || *mask == self.others
    }
}

impl Reservation {
    fn new(cpus: CpuSet, off: CpuSet, cores: &[Core]) -> Self {
        Self { cpus, off, places: Places::of(&cpus, cores) }
    }
}

/// What a value of `KREX_RESERVED_CPUS` asks for; `None`: it is not set. CPUs that are `reserved`
/// already were judged then, and this process may be fenced off them.
///
/// # Errors
/// If it is not a list of CPUs of this machine that this process may use.
fn wished(setting: Option<&OsStr>, reserved: &CpuSet) -> Result<Option<CpuSet>> {
    let Some(value) = setting else { return Ok(None) };
    let invalid = |problem: String| Error::Invalid(format!("{SETTING} is {value:?}: {problem}"));
    let list = value.to_str().unwrap_or("\u{fffd}");
    if list.trim() == "none" {
        return Ok(Some(CpuSet::default()));
    }
    let wanted = CpuSet::parse(list).map_err(|error| {
        invalid(format!("{error}. Use `none` to reserve none, or unset it for the default"))
    })?;
    let missing = |there: &CpuSet| wanted.without(there);
    if let Some(online) = topology::online(Path::new(SYSTEM))
        && !missing(&online).is_empty()
    {
        let missing = missing(&online);
        return Err(invalid(format!(
            "this machine has no CPU {missing} that is online. Choose from {online}"
        )));
    }
    let permitted =
        affinity::permitted(&wanted).map_err(|error| Error::system("sched_setaffinity", error))?;
    let missing = missing(&permitted).without(reserved);
    if !missing.is_empty() {
        let all = affinity::permitted(&CpuSet::ALL).unwrap_or_default();
        return Err(invalid(format!(
            "this process may not use CPU {missing} (a cpuset, of its container for example, \
             leaves it {all}). Choose from those"
        )));
    }
    Ok(Some(wanted))
}

/// The CPUs reserved for a device, if any.
#[inline]
pub fn of(layout: &Layout, index: usize) -> Option<(usize, Reservation)> {
    // Acquire: partner of the swap in `publish`, which comes after the record was completed.
    let word = layout.devices[index].reservation.load(Ordering::Acquire);
    if word == 0 {
        return None;
    }
    let record = Allotment::unpack(word)?.record?;
    Some((record, read(layout, record)?))
}

/// The reservation in a record, if it is complete.
pub fn read(layout: &Layout, record: usize) -> Option<Reservation> {
    let record = layout.reservations.get(record)?;
    // Acquire: partner of the Release in `record_of`.
    (record.state.load(Ordering::Acquire) == SlotState::Live as u64).then(|| Reservation {
        cpus: record.cpus.get(),
        off: record.off.get(),
        places: Places { caller: record.caller.get(), others: record.others.get() },
    })
}

/// What is reserved for any device: nobody runs there but holders.
pub fn of_all(layout: &Layout) -> CpuSet {
    taken(layout, |_| true)
}

/// Changes whenever [`of_all`] may have.
pub fn fingerprint(layout: &Layout) -> u64 {
    device::with_regions(layout)
        .map(|index| layout.devices[index].reservation.load(Ordering::Acquire))
        .fold(0, |all, word| all.wrapping_mul(31).wrapping_add(word))
}

fn taken(layout: &Layout, by: impl Fn(usize) -> bool) -> CpuSet {
    device::with_regions(layout)
        .filter(|index| by(*index))
        .filter_map(|index| of(layout, index))
        .fold(CpuSet::default(), |all, (_, it)| all.union(&it.off))
}

/// Whether a device has reserved CPUs without anybody asking for it. Work on the device `cpu` is
/// timed on the CPUs, and may want all of them; its siblings are frozen anyway.
fn has_default(name: &str) -> bool {
    name != device::DEFAULT && !name.starts_with("cpu:")
}

/// Sees to it that a device has the reservation that this process asks for, or the default one.
///
/// # Errors
/// [`Error::Invalid`] if `KREX_RESERVED_CPUS` is no list of CPUs that can be used, or differs from
/// what the commands that run already asked for; [`Error::Full`].
pub fn allot(layout: &Layout, index: usize) -> Result<()> {
    let section = &layout.devices[index];
    let wished = wished(std::env::var_os(SETTING).as_deref(), &of_all(layout))?;
    loop {
        let seen = section.reservation.load(Ordering::Acquire);
        let current = Allotment::unpack(seen);
        let cpus = of(layout, index).map_or(CpuSet::default(), |(_, it)| it.cpus);
        let reservation = match (wished, current) {
            (Some(wanted), Some(_)) if wanted == cpus => return Ok(()),
            (Some(wanted), Some(current)) if current.explicit || !cpus.is_empty() => {
                return Err(conflict(&section.name.get(), &wanted, &cpus));
            }
            (Some(wanted), _) => {
                Reservation::new(wanted, wanted, &topology::cores(Path::new(SYSTEM)))
            }
            (None, Some(current)) if current.explicit => return Ok(()),
            (None, None) if !has_default(&section.name.get()) => return Ok(()),
            // Of two devices that chose at the same moment, the one with the higher number gives
            // way: each published its choice before it looked.
            (None, Some(_)) if !cpus.meets(&taken(layout, |it| it < index)) => return Ok(()),
            (None, _) => {
                let permitted = affinity::permitted(&CpuSet::ALL)
                    .map_err(|error| Error::system("sched_setaffinity", error))?;
                let cores = topology::cores(Path::new(SYSTEM));
                by_default(&cores, &permitted, &taken(layout, |it| it != index))
            }
        };
        publish(layout, index, seen, wished.is_some(), &reservation)?;
    }
}

fn conflict(device: &str, wanted: &CpuSet, current: &CpuSet) -> Error {
    let words = |cpus: &CpuSet| match cpus.is_empty() {
        true => "none".to_owned(),
        false => cpus.to_string(),
    };
    Error::Invalid(format!(
        "{SETTING} is {}, but commands that run already have reserved {} for {device}. Give all \
         commands the same setting, or wait until the others have ended",
        words(wanted),
        words(current)
    ))
}

/// Puts a reservation in the place of `seen`; if that has changed, the caller looks again.
fn publish(
    layout: &Layout,
    index: usize,
    seen: u64,
    explicit: bool,
    reservation: &Reservation,
) -> Result<()> {
    let record = match reservation.cpus.is_empty() {
        true => None,
        false => Some(record_of(layout, reservation)?),
    };
    let word = Allotment { explicit, record }.pack();
    // AcqRel: whoever reads the word finds the record complete.
    let swapped = layout.devices[index].reservation.compare_exchange(
        seen,
        word,
        Ordering::AcqRel,
        Ordering::Acquire,
    );
    if swapped.is_ok() && record.is_some() {
        log::info!(
            "CPUs {} are reserved for {}",
            reservation.cpus,
            layout.devices[index].name.get()
        );
        // The supervisors keep their tenants off.
        ring_for(layout, layout.live_tenants.iter());
    }
    Ok(())
}

/// The record of a reservation, made if there is none. One whose maker died is lost for good.
fn record_of(layout: &Layout, reservation: &Reservation) -> Result<usize> {
    for (index, record) in layout.reservations.iter().enumerate() {
        let (free, starting) = (SlotState::Free as u64, SlotState::Starting as u64);
        if read(layout, index).as_ref() == Some(reservation) {
            return Ok(index);
        }
        // AcqRel: only the one that wins writes.
        let claimed =
            record.state.compare_exchange(free, starting, Ordering::AcqRel, Ordering::Relaxed);
        if claimed.is_ok() {
            record.cpus.set(&reservation.cpus);
            record.off.set(&reservation.off);
            record.caller.set(&reservation.places.caller);
            record.others.set(&reservation.places.others);
            // Release: partner of the Acquire in `read`.
            record.state.store(SlotState::Live as u64, Ordering::Release);
            return Ok(index);
        }
    }
    Err(Error::Full { what: "reservation", capacity: RESERVATIONS })
}

/// Forgets all reservations, if there is no command any more that they could concern: the next one
/// decides anew. For supervisors that are about to end.
pub fn forget_unused(layout: &Layout) {
    for index in device::with_regions(layout) {
        let word = &layout.devices[index].reservation;
        let seen = word.load(Ordering::Acquire);
        if layout.live_tenants.iter().next().is_none() && seen != 0 {
            let _ = word.compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// The cores for one device: the last ones of the node that has most of them left, without the
/// machine's first core, which is busy with interrupts. None on a small machine, or if everybody
/// else would be left with less than half of the cores. `taken` has what other devices have.
fn by_default(cores: &[Core], permitted: &CpuSet, taken: &CpuSet) -> Reservation {
    let none = Reservation::default();
    let usable: Vec<&Core> = cores.iter().filter(|core| core.cpus.meets(permitted)).collect();
    let is_taken = |core: &Core| core.cpus.meets(taken);
    let already = usable.iter().filter(|core| is_taken(core)).count();
    if usable.len() <= SMALL_MACHINE || 2 * (already + CORES_PER_DEVICE) > usable.len() {
        return none;
    }
    let is_free = |core: &&Core| !is_taken(core) && !core.cpus.contains(0);
    let free_on = |node: usize| -> Vec<&Core> {
        usable.iter().copied().filter(is_free).filter(|core| core.node == node).collect()
    };
    let nodes = usable.iter().map(|core| core.node);
    let Some(best) = nodes.map(free_on).max_by_key(Vec::len) else { return none };
    let Some(first) = best.len().checked_sub(CORES_PER_DEVICE) else { return none };
    let chosen = &best[first..];
    // Each core's first thread works; the other ones are kept free.
    let of_core = |core: &&Core| core.cpus.intersection(permitted).first();
    let cpus: CpuSet = chosen.iter().filter_map(of_core).collect();
    let off = chosen.iter().fold(CpuSet::default(), |all, core| all.union(&core.cpus));
    Reservation::new(cpus, off, cores)
}

/// What a device would get, for people.
#[derive(Debug)]
pub struct Plan {
    pub cpus: CpuSet,
    pub reason: String,
    /// Nobody else would have a CPU left, so nobody could be kept off.
    pub leaves_none: bool,
}

/// What a device would get if this process were the first to use it, with this value of
/// `KREX_RESERVED_CPUS` if it is set.
///
/// # Errors
/// As [`allot`].
pub fn plan(name: &str, setting: Option<&OsStr>) -> Result<Plan> {
    let permitted = affinity::permitted(&CpuSet::ALL)
        .map_err(|error| Error::system("sched_setaffinity", error))?;
    let (cpus, reason) = match wished(setting, &CpuSet::default())? {
        Some(cpus) => (cpus, format!("{SETTING} says so")),
        None if !has_default(name) => {
            (CpuSet::default(), format!("the default for the device {name}"))
        }
        None => {
            let cores = topology::cores(Path::new(SYSTEM));
            let found = by_default(&cores, &permitted, &CpuSet::default());
            (found.cpus, format!("the default on {} cores", cores.len()))
        }
    };
    Ok(Plan { cpus, reason, leaves_none: permitted.without(&cpus).is_empty() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `nodes` sockets with `each` cores of `threads` threads, numbered as Linux does: first the
    /// first threads of all cores.
    fn machine(nodes: usize, each: usize, threads: usize) -> Vec<Core> {
        let cores = nodes * each;
        (0..cores)
            .map(|core| Core {
                node: core / each,
                cpus: (0..threads).map(|thread| core + thread * cores).collect(),
            })
            .collect()
    }

    fn list(text: &str) -> CpuSet {
        CpuSet::parse(text).unwrap()
    }

    fn chosen(cores: &[Core], permitted: &str, taken: &str) -> (String, String) {
        let found = by_default(cores, &list(permitted), &list(taken));
        (found.cpus.to_string(), found.off.to_string())
    }

    fn pair(cpus: &str, off: &str) -> (String, String) {
        (cpus.to_owned(), off.to_owned())
    }

    #[test]
    fn small_machines_keep_all_their_cores() {
        for (cores, permitted) in [
            (machine(1, 2, 1), "0-1"),
            (machine(1, 4, 1), "0-3"),
            (machine(1, 4, 2), "0-7"),
            // A container that may use four of sixteen.
            (machine(1, 16, 1), "4-7"),
            (machine(1, 16, 2), "4-7,20-23"),
        ] {
            assert_eq!(chosen(&cores, permitted, ""), pair("", ""));
        }
    }

    #[test]
    fn two_cores_of_one_node_with_their_hyperthreads() {
        assert_eq!(chosen(&machine(1, 8, 1), "0-7", ""), pair("6-7", "6-7"));
        assert_eq!(chosen(&machine(1, 8, 2), "0-15", ""), pair("6-7", "6-7,14-15"));
        // Two sockets: the first core is left out, so that the second socket has more.
        assert_eq!(chosen(&machine(2, 8, 2), "0-31", ""), pair("14-15", "14-15,30-31"));
        assert_eq!(chosen(&machine(2, 8, 2), "0-31", "14-15,30-31"), pair("6-7", "6-7,22-23"));
    }

    #[test]
    fn devices_do_not_share_and_leave_half_of_the_machine() {
        let cores = machine(2, 8, 2);
        let (mut taken, mut all) = (CpuSet::default(), Vec::new());
        for _ in 0..5 {
            let found = by_default(&cores, &list("0-31"), &taken);
            assert!(!found.off.meets(&taken));
            taken = taken.union(&found.off);
            all.push(found.cpus.to_string());
        }
        assert_eq!(all, ["14-15", "6-7", "12-13", "4-5", ""]);
    }

    #[test]
    fn offline_and_forbidden_cpus_are_left_out() {
        // CPUs 7 and 14 are offline: core 6 has only its first thread, core 7 only its second.
        let mut cores = machine(1, 8, 2);
        cores[6].cpus = list("6");
        cores[7].cpus = list("15");
        assert_eq!(chosen(&cores, "0-6,8-13,15", ""), pair("6,15", "6,15"));
        // A container without the second threads: they are nobody's in here, and kept off anyway.
        assert_eq!(chosen(&machine(1, 8, 2), "0-7", ""), pair("6-7", "6-7,14-15"));
        assert_eq!(chosen(&machine(1, 16, 1), "2-9", ""), pair("8-9", "8-9"));
        assert_eq!(chosen(&[], "0-7", ""), pair("", ""));
    }

    #[test]
    fn the_calling_thread_has_a_core_of_its_own() {
        let cores = machine(1, 4, 2);
        for (cpus, caller, others) in [
            ("1", "1", "1"),
            ("1-2", "1", "2"),
            ("1,5", "1", "5"),
            ("1-2,5-6", "1", "2,6"),
            ("1-3", "1", "2-3"),
        ] {
            let places = Places::of(&list(cpus), &cores);
            assert_eq!((places.caller, places.others), (list(caller), list(others)), "{cpus}");
            assert!(places.include(&list(caller)) && !places.include(&list("0-7")));
        }
    }
}
