//! Which CPUs are kept for a device's regions (for step 6, `isolate.rs`).
//!
//! The first command that wants any decides, through one word of the device's section, for as long
//! as there are commands. The CPUs themselves stand in records that do not change as long as a
//! device names them; records are shared by all devices with the same reservation.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::affinity::{self, CpuSet};
use crate::device;
use crate::error::{Error, Result};
use crate::isolate;
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

/// What a value of `KREX_RESERVED_CPUS` asks for; `None`: it is not set.
///
/// # Errors
/// If it is not a list of CPUs.
fn wished(setting: Option<&OsStr>) -> Result<Option<CpuSet>> {
    let Some(value) = setting else { return Ok(None) };
    let list = value.to_str().unwrap_or("\u{fffd}");
    if list.trim() == "none" {
        return Ok(Some(CpuSet::default()));
    }
    let wanted = CpuSet::parse(list).map_err(|error| {
        Error::Invalid(format!(
            "{SETTING} is {value:?}: {error}. Use `none` to reserve none, or unset it for the \
             default"
        ))
    })?;
    Ok(Some(wanted))
}

/// Whether they are CPUs of this machine that this process may use.
///
/// # Errors
/// If not.
fn check(wanted: &CpuSet) -> Result<()> {
    let invalid =
        |problem: String| Err(Error::Invalid(format!("{SETTING} is {wanted}: {problem}")));
    if let Some(online) = topology::online(Path::new(SYSTEM))
        && !wanted.without(&online).is_empty()
    {
        let missing = wanted.without(&online);
        return invalid(format!(
            "this machine has no CPU {missing} that is online. Choose from {online}"
        ));
    }
    let permitted =
        affinity::permitted(wanted).map_err(|error| Error::system("sched_setaffinity", error))?;
    let missing = wanted.without(&permitted);
    if !missing.is_empty() {
        let all = affinity::permitted(&CpuSet::ALL).unwrap_or_default();
        return invalid(format!(
            "this process may not use CPU {missing} (a cpuset, of its container for example, \
             leaves it {all}). Choose from those"
        ));
    }
    Ok(())
}

/// The CPUs reserved for a device, if any.
#[inline]
pub fn of(layout: &Layout, index: usize) -> Option<(usize, Reservation)> {
    let word = &layout.devices[index].reservation;
    loop {
        // Acquire: partner of the swap in `publish`, which comes after the record was completed.
        let seen = word.load(Ordering::Acquire);
        if seen == 0 {
            return None;
        }
        let record = Allotment::unpack(seen)?.record?;
        let found = read(layout, record);
        // A record is freed, and used again, only while no device names it.
        if word.load(Ordering::Acquire) == seen {
            return Some((record, found?));
        }
    }
}

/// What is decided for a device, to be compared with what [`allot`] returned. Never zero.
#[inline]
pub fn seen(layout: &Layout, index: usize) -> u64 {
    // Relaxed: whoever then reads the record comes through `of`.
    layout.devices[index].reservation.load(Ordering::Relaxed) | LOOKED_AT
}

/// A bit that no [`Allotment`] has.
const LOOKED_AT: u64 = 1 << 63;

/// The reservation in a record, if it is complete.
pub fn read(layout: &Layout, record: usize) -> Option<Reservation> {
    let record = layout.reservations.get(record)?;
    // SeqCst: see `publish`; and partner of the Release in `record_of`.
    (record.state.load(Ordering::SeqCst) == SlotState::Live as u64).then(|| Reservation {
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
/// Returns what [`seen`] says of it.
///
/// # Errors
/// [`Error::Invalid`] if `KREX_RESERVED_CPUS` is no list of CPUs that can be used, or differs from
/// what the commands that run already asked for; [`Error::Full`].
pub fn allot(layout: &Layout, index: usize) -> Result<u64> {
    let section = &layout.devices[index];
    let wished = wished(std::env::var_os(SETTING).as_deref())?;
    loop {
        let seen = section.reservation.load(Ordering::Acquire);
        let current = Allotment::unpack(seen);
        let cpus = of(layout, index).map_or(CpuSet::default(), |(_, it)| it.cpus);
        let settled = Ok(seen | LOOKED_AT);
        let reservation = match (wished, current) {
            // Somebody has tried them already: nothing is moved for it.
            (Some(wanted), Some(_)) if wanted == cpus => return settled,
            (Some(wanted), Some(current)) if current.explicit || !cpus.is_empty() => {
                return Err(conflict(&section.name.get(), &wanted, &cpus));
            }
            (Some(wanted), _) => {
                check(&wanted)?;
                Reservation::new(wanted, wanted, &topology::cores(Path::new(SYSTEM)))
            }
            (None, Some(current)) if current.explicit => return settled,
            (None, None) if !has_default(&section.name.get()) => return settled,
            // Of two devices that chose at the same moment, the one with the higher number gives
            // way: each published its choice before it looked.
            (None, Some(_)) if !cpus.meets(&taken(layout, |it| it < index)) => return settled,
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
    let section = &layout.devices[index];
    // SeqCst: one says that it uses the record, then looks whether it is there; `free_unused`
    // claims it, then looks whether anybody uses it (a handshake as in `sync.rs`).
    let swap = |from: u64, to: u64| {
        let word = &section.reservation;
        word.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    };
    if !swap(seen, word) {
        return Ok(());
    }
    let Some(record) = record else { return Ok(()) };
    if read(layout, record).as_ref() != Some(reservation) {
        swap(word, seen);
        return Ok(());
    }
    log::info!("CPUs {} are reserved for {}", reservation.cpus, section.name.get());
    // The supervisors keep their tenants off.
    ring_for(layout, layout.live_tenants.iter());
    Ok(())
}

/// The record of a reservation, made if there is none. One whose maker died is lost for good.
fn record_of(layout: &Layout, reservation: &Reservation) -> Result<usize> {
    let all = || layout.reservations.iter().enumerate();
    if let Some((index, _)) = all().find(|it| read(layout, it.0).as_ref() == Some(reservation)) {
        return Ok(index);
    }
    let (free, starting) = (SlotState::Free as u64, SlotState::Starting as u64);
    for (index, record) in all() {
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
    let is_unused = || layout.live_tenants.iter().next().is_none();
    for index in device::with_regions(layout) {
        let word = &layout.devices[index].reservation;
        let seen = word.load(Ordering::Acquire);
        if is_unused() && seen != 0 {
            let _ = word.compare_exchange(seen, 0, Ordering::SeqCst, Ordering::Relaxed);
        }
    }
    if is_unused() && !isolate::has_entries(layout) {
        free_unused(layout);
    }
}

/// Frees the records that no device names, so that there is room for others.
fn free_unused(layout: &Layout) {
    let [free, live, ending] =
        [SlotState::Free, SlotState::Live, SlotState::Ending].map(|it| it as u64);
    for (index, record) in layout.reservations.iter().enumerate() {
        // SeqCst: see `publish`.
        let claimed =
            record.state.compare_exchange(live, ending, Ordering::SeqCst, Ordering::Relaxed);
        if claimed.is_ok() {
            let is_used = layout.devices.iter().any(|device| {
                let word = device.reservation.load(Ordering::SeqCst);
                Allotment::unpack(word).is_some_and(|it| it.record == Some(index))
            });
            record.state.store(if is_used { live } else { free }, Ordering::SeqCst);
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
    let (cpus, reason) = match wished(setting)? {
        Some(cpus) => {
            check(&cpus)?;
            (cpus, format!("{SETTING} says so"))
        }
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
    use crate::segment::Segment;

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
    fn records_are_free_again_when_no_device_names_them() {
        let directory =
            std::env::temp_dir().join(format!("krex-reservations-{}", std::process::id()));
        let segment = Segment::open_or_create(&directory).unwrap();
        let index = device::find_or_add(&segment, device::DEFAULT).unwrap();
        for cpu in 0..2 * RESERVATIONS {
            let cpus: CpuSet = [cpu].into_iter().collect();
            let wanted = Reservation::new(cpus, cpus, &[]);
            publish(&segment, index, 0, true, &wanted).unwrap();
            free_unused(&segment);
            assert_eq!(of(&segment, index).map(|it| it.1), Some(wanted), "it is in use");
            forget_unused(&segment);
            assert_eq!(of(&segment, index), None);
        }
        std::fs::remove_dir_all(&directory).unwrap();
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
