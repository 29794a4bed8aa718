//! Taking tenures away, and putting things right: by supervisors, and by hand.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::cgroup::{self, Group, Mount};
use crate::client::Host;
use crate::clock::{self, Deadline};
use crate::device;
use crate::error::{Error, Result};
use crate::freezer::{ProcessTable, continue_all};
use crate::hand_over;
use crate::isolate;
use crate::keep_off;
use crate::layout::{DEVICES, Layout, SUPERVISORS, TENANTS};
use crate::process::{self, Identity};
use crate::reservation;
use crate::segment::Segment;
use crate::supervision;
use crate::tenant;
use crate::word::{Cause, Frozen, GateWord, Revocation, SlotState, Stage};

/// Takes a tenure away from its holder: one swap to open, with the cause left for the holder.
/// Returns whether it was still its tenure.
pub fn revoke(segment: &Layout, index: usize, word: GateWord, cause: Cause) -> bool {
    let section = &segment.devices[index];
    let revocation = Revocation { tenure: word.tenure(), cause };
    // Release: partner of the Acquire in the holder's reading, after it finds its tenure gone.
    // If the swap fails, the tenure has ended by itself and nobody asks for its cause.
    section.revocation.store(revocation.pack(), Ordering::Release);
    let revoked = hand_over::open(segment, index, word).is_ok();
    if revoked {
        log::info!("revoked {word:?} of {}: {cause:?}", section.name.get());
    }
    revoked
}

/// Rings for the supervisors of `tenants`, once each.
pub fn ring_for(segment: &Layout, tenants: impl Iterator<Item = usize>) {
    let mut slots: Vec<usize> =
        tenants.map(|slot| segment.tenants[slot].owner().supervisor()).collect();
    slots.sort_unstable();
    slots.dedup();
    for slot in slots {
        supervision::ring(segment, slot);
    }
}

/// Thaws everything that the workers of supervisor slot `slot` froze, and marks it in the
/// acknowledgements: a region that is running was disturbed. Returns the names of those that
/// were frozen.
pub fn take_over(segment: &Layout, slot: usize) -> Vec<String> {
    let mut thawed = Vec::new();
    for index in 0..segment.tenants_used() {
        let tenant = &segment.tenants[index];
        let owner = tenant.owner();
        if owner.supervisor() != slot || owner.is_free() {
            continue;
        }
        for device in 0..DEVICES {
            note_thaw(segment, index, device, None);
        }
        if let Some(group) = Group::at(&tenant.cgroup.get()) {
            let _ = fs::write(group.directory.join("cgroup.freeze"), "0");
        }
        isolate::restore_if_over(segment, index, &[]);
        let since = tenant.frozen_since.swap(0, Ordering::AcqRel);
        if since != 0 {
            let frozen = clock::now().saturating_sub(since);
            tenant.frozen_total.fetch_add(frozen, Ordering::AcqRel);
            thawed.push(tenant.name.get());
        }
    }
    continue_all(segment, slot);
    isolate::restore_leftovers(segment, slot);
    thawed
}

/// Marks a tenant's acknowledgement for a region that runs now: it is about to be thawed. Nothing
/// is marked for the tenure `expected`, of which it is known.
pub fn note_thaw(segment: &Layout, slot: usize, device: usize, expected: Option<u64>) {
    let acks = &segment.tenants[slot].acks;
    let mut ack = segment.tenants[slot].ack(device);
    let word = segment.devices[device].gate().load();
    let counts = !word.is_open()
        && ack.tenure == word.tenure()
        && expected != Some(word.tenure())
        // One that turned out to be of the holder's family is thawed for good reason.
        && word.holder() != slot
        && !tenant::descends_from(segment, slot, word.holder())
        && ack.stage >= Stage::Settled
        && ack.frozen != Frozen::No;
    if counts {
        ack.disturbed = true;
        // Release, in both: partners of the Acquire in the holder's report.
        let section = &segment.devices[device];
        section.disturbed_tenure.fetch_max(word.tenure(), Ordering::AcqRel);
        acks[device].store(ack.pack(), Ordering::Release);
    }
}

/// Repairs what can be repaired from this PID namespace by this user. Returns what was done.
///
/// # Errors
/// If the segment cannot be used, or the supervisor does not start.
pub fn recover(directory: &Path, host: &dyn Host) -> Result<Vec<String>> {
    let mut done = Vec::new();
    let Some(segment) = Segment::open(directory)? else {
        done.extend(remove_groups(directory, None));
        return Ok(done);
    };
    let identity = Identity::of_self()?;
    let now = clock::now();
    let own = supervision::find(&segment, &identity);
    if let Some(slot) = own.filter(|slot| segment.is_supervisor_alive(*slot)) {
        let before = segment.supervisors[slot].keeper.load(Ordering::Acquire);
        supervision::revive(&segment, &identity, slot, || host.program())?;
        if segment.supervisors[slot].keeper.load(Ordering::Acquire) != before {
            done.push("replaced a supervisor that was stopped".to_owned());
        }
    }
    if let Some(slot) = own.filter(|slot| !segment.is_supervisor_alive(*slot)) {
        for name in take_over(&segment, slot) {
            done.push(format!("thawed {name}, whose supervisor had died"));
        }
        let mut left = 0;
        for index in 0..TENANTS {
            let tenant = &segment.tenants[index];
            let owner = tenant.owner();
            if owner.is_free() || owner.supervisor() != slot {
                continue;
            }
            let start_time = tenant.start_time.load(Ordering::Acquire);
            let group = Group::at(&tenant.cgroup.get());
            let is_alive = process::is_alive(owner.pid(), start_time)
                || group.is_some_and(|group| group.is_populated());
            if is_alive {
                left += 1;
                continue;
            }
            let name = tenant.name.get();
            let end = || revoke_held_by(&segment, index, Cause::Died, &mut done);
            let cleaner = tenant::Cleaner { pid: identity.pid, supervisor: slot };
            if tenant::release(&segment, index, owner, cleaner, end) {
                done.push(format!("freed the slot of {name} ({})", owner.pid()));
            }
        }
        if left > 0 {
            supervision::ensure(&segment, &identity, &host.program()?)?;
            done.push(format!("started the supervisor of {left} running tenants again"));
        }
    }
    for index in device::with_regions(&segment) {
        let section = &segment.devices[index];
        let word = section.gate().load();
        let Some(holder) = segment.tenants.get(word.holder()) else { continue };
        let deadline = holder.holding.hold_deadline.load(Ordering::Acquire);
        let is_late = now > deadline.saturating_add(clock::SECOND);
        let timed = !word.is_open() && !word.phase().is_granted();
        if timed && is_late && revoke(&segment, index, word, Cause::Deadline) {
            done.push(format!("ended a region on {} that was past its limit", section.name.get()));
        }
    }
    ring_for(&segment, segment.live_tenants.iter());
    done.extend(remove_groups(directory, Some(&segment)));
    Ok(done)
}

fn revoke_held_by(segment: &Layout, holder: usize, cause: Cause, done: &mut Vec<String>) {
    for index in device::in_use(segment) {
        let section = &segment.devices[index];
        let word = section.gate().load();
        if !word.is_open() && word.holder() == holder && revoke(segment, index, word, cause) {
            done.push(format!(
                "opened the gate of {}, held by {}",
                section.name.get(),
                segment.tenants[holder].name.get()
            ));
        }
    }
}

/// Takes krex out of use: every gate is opened, everybody thawed, supervisors end, the segment
/// is removed. Commands that run go on without krex, or make a new segment at their next use.
///
/// # Errors
/// If the directory is not ours, or files cannot be removed.
pub fn purge(directory: &Path) -> Result<Vec<String>> {
    let mut done = Vec::new();
    match Segment::open(directory) {
        Ok(Some(segment)) => retire(&segment, &mut done),
        Ok(None) => {}
        Err(error @ Error::Segment { .. }) => {
            // Not usable, so nobody can be told; the files can still be removed.
            done.push(format!("found a damaged segment: {error}"));
        }
        Err(error) => return Err(error),
    }
    done.extend(remove_groups(directory, None));
    for name in ["segment", "krex.log"] {
        let path = directory.join(name);
        match fs::remove_file(&path) {
            Ok(()) => done.push(format!("removed {}", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) if error.kind() == std::io::ErrorKind::IsADirectory => {
                let remedy = format!("Remove it: `rm -r {}`", path.display());
                return Err(Error::segment(&path, "is a directory", remedy));
            }
            Err(error) => return Err(Error::system(path.display().to_string(), error)),
        }
    }
    // Only if nothing else is in it.
    if fs::remove_dir(directory).is_ok() {
        done.push(format!("removed {}", directory.display()));
    }
    Ok(done)
}

fn retire(segment: &Segment, done: &mut Vec<String>) {
    // Release: whoever sees the mark finds the gates open, or opens a new segment anyway.
    segment.header.retired.store(1, Ordering::Release);
    for index in device::in_use(segment) {
        let section = &segment.devices[index];
        let word = section.gate().load();
        if !word.is_open() && revoke(segment, index, word, Cause::ByHand) {
            done.push(format!("ended the region on {}", section.name.get()));
        }
        section.gate().wake();
    }
    let left = segment.live_tenants.iter().count();
    if left > 0 {
        done.push(format!("left {left} commands running, which nobody excludes any more"));
    }
    let alive = || (0..SUPERVISORS).filter(|slot| segment.is_supervisor_alive(*slot));
    for slot in alive() {
        supervision::ring(segment, slot);
    }
    let deadline = Deadline::after(Duration::from_secs(3));
    while alive().next().is_some() && !deadline.has_passed() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let own = Identity::of_self().ok().and_then(|it| supervision::find(segment, &it));
    for slot in alive() {
        if Some(slot) == own {
            supervision::kill_pair(segment, slot);
            done.push("killed a supervisor that did not end".to_owned());
        } else {
            done.push(
                "left a supervisor of another PID namespace, which ends by itself".to_owned(),
            );
        }
    }
    if let Some(slot) = own {
        for name in take_over(segment, slot) {
            done.push(format!("thawed {name}"));
        }
        let off = reservation::of_all(segment);
        let mut processes = ProcessTable::default();
        for tenant in segment.live_tenants.iter() {
            if segment.tenants[tenant].owner().supervisor() == slot {
                keep_off::give_back(segment, tenant, &off, &mut processes);
            }
        }
    }
}

/// Removes the empty groups that earlier segments of this runtime directory left behind, whose
/// supervisor did not live to do it.
pub fn remove_empty_groups(segment: &Segment) {
    for group in unused_groups(segment.directory(), Some(segment)) {
        if !group.is_populated() {
            group.remove();
        }
    }
}

/// Thaws and removes groups of this runtime directory that no tenant uses.
fn remove_groups(directory: &Path, segment: Option<&Layout>) -> Vec<String> {
    let mut done = Vec::new();
    for group in unused_groups(directory, segment) {
        let _ = fs::write(group.directory.join("cgroup.freeze"), "0");
        group.remove();
        let what = if group.directory.exists() { "thawed" } else { "removed" };
        let name = group.directory.file_name().unwrap_or_default().to_string_lossy();
        done.push(format!("{what} the cgroup {name}"));
    }
    done
}

/// The groups of this runtime directory, where this process would make them, that no tenant uses.
fn unused_groups(directory: &Path, segment: Option<&Layout>) -> Vec<Group> {
    let prefix = tenant::group_prefix(directory);
    let parent = cgroup::parent_for_tenants()
        .and_then(|parent| Mount::find()?.directory(&parent))
        .and_then(|path| fs::read_dir(path).ok());
    let is_used = |name: &str| {
        segment.is_some_and(|segment| {
            segment.tenants.iter().any(|tenant| {
                tenant.owner().state() != SlotState::Free
                    && tenant.cgroup.get().ends_with(&format!("/{name}"))
            })
        })
    };
    let name = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    parent
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| name(entry).starts_with(&prefix) && !is_used(&name(entry)))
        .map(|entry| Group { directory: entry.path() })
        .collect()
}
