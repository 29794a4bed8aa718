//! Tenants: registering, finding the one that a process belongs to, freeing the slot.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::affinity::CpuSet;
use crate::cgroup::{self, Group};
use crate::clock;
use crate::device;
use crate::error::{Error, Result};
use crate::freezer::{Choice, Kind};
use crate::hooks;
use crate::isolate;
use crate::keep_off;
use crate::layout::{Layout, TENANTS, Tenant};
use crate::process::{self, Identity};
use crate::segment::Segment;
use crate::supervision;
use crate::sync;
use crate::word::{Ack, IsolationWord, OwnerWord, Phase, Reference, SlotState};

/// What a tenant brings along.
#[derive(Clone, Debug)]
pub struct Registration {
    pub name: String,
    /// Bit i: shares device i.
    pub devices: u64,
    /// The device that was named for it.
    pub default_device: Option<usize>,
    pub parent: Option<Reference>,
    pub freezer: Choice,
    /// Nanoseconds; zero: no limit.
    pub time_limit: u64,
    /// End it when work of it never ends.
    pub on_stuck: bool,
    /// It starts with the interposer.
    pub preloaded: bool,
    /// It runs already, instead of being about to start.
    pub attached: bool,
}

/// Makes the calling process the root of a new tenant.
///
/// # Errors
/// [`Error::Full`], or what the supervisor or the freezer asked for by name reports.
pub fn register(
    segment: &Segment,
    supervisor: usize,
    identity: &Identity,
    registration: &Registration,
) -> Result<Reference> {
    let session = segment.supervisors[supervisor].session.load(Ordering::SeqCst);
    let (slot, owner) = claim(segment, identity.pid, supervisor)?;
    let cleaner = Cleaner { pid: identity.pid, supervisor };
    let tenant = &segment.tenants[slot];
    fill(segment, tenant, identity, registration);
    let reference = Reference { slot, generation: owner.generation() };
    let joined = join_freezer(segment, reference, identity, registration.freezer);
    hooks::fault("registering");
    match joined {
        Ok(kind) => tenant.freezer.store(kind as u64, Ordering::Release),
        Err(error) => {
            release(segment, slot, owner, cleaner, || {});
            return Err(error);
        }
    }
    if registration.attached {
        // Before it is live: from then on it may be frozen at any moment.
        device::with_regions(segment)
            .filter(|device| tenant.shares(*device))
            .for_each(|device| note_newcomer(segment, device));
    }
    // SeqCst: the writing half of the handshake with a closing gate: either the holder's list
    // has this tenant, or the tenant's next look at the gate finds it closed (`sync.rs`).
    tenant.owner.store(owner.with_state(SlotState::Live).0, Ordering::SeqCst);
    sync::fence_between();
    if segment.supervisors[supervisor].session.load(Ordering::SeqCst) != session {
        // The supervisor went, or goes, without having seen this tenant.
        release(segment, slot, owner.with_state(SlotState::Live), cleaner, || {});
        return Err(Error::Supervisor("it ended meanwhile".to_owned()));
    }
    supervision::ring(segment, supervisor);
    hooks::fault("registered");
    Ok(reference)
}

/// A process is about to share `device` that has run so far without anybody's knowing of it: a
/// region that runs now was not alone.
pub fn note_newcomer(segment: &Layout, device: usize) {
    let section = &segment.devices[device];
    let word = section.gate().load();
    if matches!(word.phase(), Phase::Closing | Phase::Held | Phase::Leaving) {
        // Release: partner of the Acquire in the holder's report.
        section.newcomer_tenure.fetch_max(word.tenure(), Ordering::Release);
    }
}

fn claim(segment: &Segment, pid: i32, supervisor: usize) -> Result<(usize, OwnerWord)> {
    for (slot, tenant) in segment.tenants.iter().enumerate() {
        segment.tenants_mark.raise(slot);
        if let Some(owner) = claim_slot(&tenant.owner, pid, supervisor) {
            segment.live_tenants.insert(slot);
            return Ok((slot, owner));
        }
    }
    Err(Error::Full { what: "tenant", capacity: TENANTS })
}

/// Claims a free slot with a new generation.
pub(crate) fn claim_slot(word: &AtomicU64, pid: i32, supervisor: usize) -> Option<OwnerWord> {
    let seen = OwnerWord(word.load(Ordering::Acquire));
    if !seen.is_free() {
        return None;
    }
    let owner = OwnerWord::new(seen.generation() + 1, pid, supervisor, SlotState::Starting);
    // AcqRel: what the cleaner did before it freed the slot comes before what we write now.
    word.compare_exchange(seen.0, owner.0, Ordering::AcqRel, Ordering::Relaxed).ok().map(|_| owner)
}

fn fill(segment: &Segment, tenant: &Tenant, identity: &Identity, registration: &Registration) {
    // Relaxed throughout: published by the store that makes the slot live.
    let set = |word: &AtomicU64, value: u64| word.store(value, Ordering::Relaxed);
    set(&tenant.start_time, identity.start_time);
    set(&tenant.parent, Reference::pack(registration.parent));
    set(&tenant.devices, registration.devices);
    set(&tenant.default_device, registration.default_device.map_or(0, |it| it as u64 + 1));
    set(&tenant.activity, 0);
    set(&tenant.freezer, 0);
    set(&tenant.registered_at, clock::now());
    set(&tenant.attached, registration.attached.into());
    set(&tenant.time_limit, registration.time_limit);
    set(&tenant.evicted, 0);
    // What splits off is part of the command that was started with it.
    let of_parent = registration.parent.map(|it| &segment.tenants[it.slot].on_stuck);
    let inherited = of_parent.map_or(0, |it| it.load(Ordering::Relaxed));
    set(&tenant.on_stuck, u64::from(registration.on_stuck) | inherited);
    // What splits off was started like the rest.
    let of_parent = registration.parent.map(|it| &segment.tenants[it.slot].preloaded);
    let inherited = of_parent.map_or(0, |it| it.load(Ordering::Relaxed));
    set(&tenant.preloaded, u64::from(registration.preloaded) | inherited);
    for word in [
        &tenant.frozen_total,
        &tenant.frozen_since,
        &tenant.waiting_total,
        &tenant.waiting_since,
        &tenant.waiting_threads,
        &tenant.frozen_before,
    ] {
        set(word, 0);
    }
    tenant.queue.leave();
    set(&tenant.isolation, IsolationWord::NONE.0);
    set(&tenant.crowded, 0);
    tenant.on_reserved.set(&CpuSet::default());
    // The process was born with its parent's mask, which may have been narrowed.
    let before = registration.parent.and_then(|it| keep_off::before(&segment.tenants[it.slot]));
    tenant.before.set(&before.unwrap_or_default());
    set(&tenant.narrowed, before.map_or(SlotState::Free, |_| SlotState::Live) as u64);
    tenant.name.set(registration.name.as_bytes());
    tenant.cgroup.set(b"");
    for (device, ack) in tenant.acks.iter().enumerate() {
        // The tenure as it is now: an acknowledgement of the slot's last user must not count.
        let tenure = segment.devices[device].gate().load().tenure();
        set(ack, Ack::none(tenure).pack());
    }
}

fn join_freezer(
    segment: &Segment,
    reference: Reference,
    identity: &Identity,
    choice: Choice,
) -> Result<Kind> {
    if choice == Choice::Only(Kind::Sigstop) {
        return Ok(Kind::Sigstop);
    }
    match join_cgroup(segment, reference, identity) {
        Ok(()) => Ok(Kind::Cgroup2),
        Err(error) if choice == Choice::Auto => {
            log::info!("no cgroup of its own ({error}): SIGSTOP is used");
            segment.tenants[reference.slot].cgroup.set(b"");
            Ok(Kind::Sigstop)
        }
        Err(error) => Err(Error::system(
            "KREX_FREEZER=cgroup2, but no cgroup can be made below the caller's own. Run as root, \
             have the group delegated (`systemd-run --user --scope -p Delegate=yes COMMAND`), or \
             use KREX_FREEZER=auto",
            error,
        )),
    }
}

fn join_cgroup(
    segment: &Segment,
    reference: Reference,
    identity: &Identity,
) -> std::io::Result<()> {
    let parent = cgroup::parent_for_tenants().ok_or(std::io::ErrorKind::NotFound)?;
    let path = format!(
        "{}/{}{:x}-{}-{}",
        parent.trim_end_matches('/'),
        group_prefix(segment.directory()),
        // Another segment may come to the same path, in time or in another mount namespace.
        segment.inode(),
        reference.slot,
        reference.generation
    );
    let tenant = &segment.tenants[reference.slot];
    if path.len() >= crate::text::SharedText::<64>::CAPACITY {
        return Err(std::io::Error::other("the path of the caller's cgroup is too long"));
    }
    // Noted before it is made, so that the cleaner finds it whenever we die.
    tenant.cgroup.set(path.as_bytes());
    let group = Group::make(&path)?;
    let joined = join_with_descendants(&group, segment, reference, identity);
    if joined.is_err() {
        group.remove();
    }
    joined
}

/// How the names of the groups of one runtime directory begin.
pub fn group_prefix(directory: &std::path::Path) -> String {
    let hash = process::hash(directory.as_os_str().as_encoded_bytes()) as u32;
    format!("{}{hash:08x}", cgroup::PREFIX)
}

/// The caller first, so that its later children are born in the group; then those that it has
/// already, until a look finds none outside.
fn join_with_descendants(
    group: &Group,
    segment: &Segment,
    reference: Reference,
    identity: &Identity,
) -> std::io::Result<()> {
    group.take(0)?;
    if process::has_no_children() {
        return Ok(());
    }
    for _ in 0..64 {
        let inside = group.processes();
        let roots = other_roots(segment, reference.slot);
        let outside: Vec<_> = process::Processes::read()
            .tree(&[identity.pid], |pid| roots.contains(&pid))
            .into_iter()
            .filter(|it| !inside.contains(&it.pid) && !it.has_ended() && !it.is_supervisor)
            .collect();
        if outside.is_empty() {
            return Ok(());
        }
        for child in outside {
            // One that has ended meanwhile needs no move.
            let _ = group.take(child.pid);
        }
    }
    Ok(())
}

/// The root processes of all other tenants in the PID namespace of the one in `slot`.
pub fn other_roots(segment: &Layout, slot: usize) -> Vec<i32> {
    let supervisor = segment.tenants[slot].owner().supervisor();
    segment
        .live_tenants
        .iter()
        .filter(|other| *other != slot)
        .map(|other| segment.tenants[other].owner())
        .filter(|owner| owner.supervisor() == supervisor)
        .map(|owner| owner.pid())
        .collect()
}

/// Frees a tenant's slot, for its cleaner, or for the owner that could not finish registering.
/// `judged` is the owner word on which the decision to free it was made: if it has changed since,
/// nothing is done. Regions that it holds end first, by `end`. Processes that are left in its
/// group go to the group above. Returns whether it was freed.
pub fn release(
    segment: &Layout,
    slot: usize,
    judged: OwnerWord,
    cleaner: Cleaner,
    end: impl FnOnce(),
) -> bool {
    let tenant = &segment.tenants[slot];
    if !claim_ending(&tenant.owner, judged, cleaner) {
        return false;
    }
    // First: a holder that hands over to it looks at its place after the swap, and `end` at the
    // gates after this, so that one of them opens the gate again.
    tenant.queue.leave();
    end();
    isolate::forget(segment, slot);
    if let Some(group) = Group::at(&tenant.cgroup.get()) {
        group.remove();
    }
    segment.live_tenants.remove(slot);
    // Release: whoever claims the slot next comes after all of the above.
    tenant.owner.store(judged.with_state(SlotState::Free).0, Ordering::Release);
    true
}

/// Who cleans up: the calling process, and the supervisor of its PID namespace.
#[derive(Clone, Copy, Debug)]
pub struct Cleaner {
    pub pid: i32,
    pub supervisor: usize,
}

/// Makes the caller the only cleaner of a slot, if its owner still is the one that was judged.
/// One that dies while it cleans leaves the slot in this state, with its own name in it, and the
/// next cleaner judges that.
pub fn claim_ending(word: &AtomicU64, judged: OwnerWord, cleaner: Cleaner) -> bool {
    let Cleaner { pid, supervisor } = cleaner;
    let ending = OwnerWord::new(judged.generation(), pid, supervisor, SlotState::Ending);
    // AcqRel: what the owner did with the slot comes before what its cleaner does.
    word.compare_exchange(judged.0, ending.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// The tenant behind a reference, if it still is that one.
pub fn resolve(segment: &Layout, reference: Reference) -> Option<&Tenant> {
    let tenant = segment.tenants.get(reference.slot)?;
    let owner = tenant.owner();
    let is_there = matches!(owner.state(), SlotState::Starting | SlotState::Live);
    (owner.generation() == reference.generation && is_there).then_some(tenant)
}

/// The tenant whose root is the process `identity`.
pub fn find_rooted(segment: &Layout, supervisor: usize, identity: &Identity) -> Option<Reference> {
    segment.live_tenants.iter().find_map(|slot| {
        let tenant = &segment.tenants[slot];
        let owner = tenant.owner();
        let is_root = owner.state() == SlotState::Live
            && owner.supervisor() == supervisor
            && owner.pid() == identity.pid
            && tenant.start_time.load(Ordering::Acquire) == identity.start_time;
        is_root.then(|| Reference { slot, generation: owner.generation() })
    })
}

/// The tenant that the calling process belongs to: by its cgroup, else by its ancestors. One of
/// another PID namespace is found by the cgroup only.
pub fn find_own(
    segment: &Layout,
    supervisor: Option<usize>,
    identity: &Identity,
) -> Option<Reference> {
    let (candidates, foreign): (Vec<_>, Vec<_>) = segment
        .live_tenants
        .iter()
        .map(|slot| (slot, segment.tenants[slot].owner()))
        .filter(|(_, owner)| owner.state() == SlotState::Live)
        .partition(|(_, owner)| Some(owner.supervisor()) == supervisor);
    let reference =
        |slot: usize, owner: OwnerWord| Reference { slot, generation: owner.generation() };
    let is_root = |slot: usize, owner: OwnerWord, pid: i32, start_time: u64| {
        let started = segment.tenants[slot].start_time.load(Ordering::Acquire);
        owner.pid() == pid && started == start_time
    };
    for (slot, owner) in &candidates {
        if is_root(*slot, *owner, identity.pid, identity.start_time) {
            return Some(reference(*slot, *owner));
        }
    }
    let path = cgroup::path_of("self").unwrap_or_default();
    if let Some(path) = cgroup::tenants_group(&path) {
        for (slot, owner) in candidates.iter().chain(&foreign) {
            if segment.tenants[*slot].cgroup.bytes() == path.as_bytes() {
                return Some(reference(*slot, *owner));
            }
        }
    }
    for ancestor in process::ancestors(identity.pid) {
        for (slot, owner) in &candidates {
            if is_root(*slot, *owner, ancestor.pid, ancestor.start_time) {
                return Some(reference(*slot, *owner));
            }
        }
    }
    None
}

/// Whether `tenant` was split off, directly or not, from the tenant in slot `ancestor`.
pub fn descends_from(segment: &Layout, tenant: usize, ancestor: usize) -> bool {
    let Some(tenant) = segment.tenants.get(tenant) else {
        return false;
    };
    let mut next = tenant.parent();
    for _ in 0..TENANTS {
        let Some(reference) = next else { return false };
        let Some(parent) = resolve(segment, reference) else {
            return false;
        };
        if reference.slot == ancestor {
            return true;
        }
        next = parent.parent();
    }
    false
}
