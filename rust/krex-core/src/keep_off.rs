//! Keeping tenants off reserved CPUs, which are for holders alone.
//!
//! `krex run` takes them off its own mask before it becomes the command; supervisors do it for
//! processes that attached themselves, for all their tenants when a device gets its reservation,
//! and once a second for threads that gave themselves another mask since. A tenant in a region is
//! left alone, and all below it: `isolate.rs` has their masks in hand.
//!
//! What its first thread had before is kept per tenant, and given back to all that are without it if
//! krex is taken out of use; a thread that had chosen another mask keeps what is left of that. One
//! that may use no other CPUs stays, and the verdict of regions there says so.

use std::sync::atomic::Ordering;

use crate::affinity::{self, CpuSet};
use crate::device;
use crate::freezer::ProcessTable;
use crate::hooks;
use crate::layout::{Layout, Tenant};
use crate::members;
use crate::reservation;
use crate::tenant;
use crate::word::{IsolationWord, SlotState};

/// Keeps the calling thread, which is a tenant's only one, off what is reserved.
pub fn keep_self_off(segment: &Layout, slot: usize) {
    let off = reservation::of_all(segment);
    if !off.is_empty() && !is_in_region(segment, slot) && !hooks::sabotaged("keep_off") {
        narrow(&segment.tenants[slot], 0, &off);
    }
}

/// Keeps a tenant off the CPUs in `off`, unless it is in a region. Returns whether it was looked
/// at.
pub fn keep_off(segment: &Layout, slot: usize, off: &CpuSet, processes: &mut ProcessTable) -> bool {
    let tenant = &segment.tenants[slot];
    if is_in_region(segment, slot) {
        return false;
    }
    let mut stays = CpuSet::default();
    for member in members::of(segment, slot, processes) {
        for thread in member.threads {
            // Looked at before each: it may enter at any moment. Who is moved in the moment in
            // between runs elsewhere than its region wants, and its verdict says so.
            if is_in_region(segment, slot) {
                return false;
            }
            if !hooks::sabotaged("keep_off") {
                stays = stays.union(&narrow(tenant, thread, off));
            }
        }
    }
    tenant.on_reserved.set(&stays);
    true
}

/// Whether a tenant, or one that it descends from, holds a region, is about to, or comes from one.
pub fn is_in_region(segment: &Layout, slot: usize) -> bool {
    let is_of = |other: usize| other == slot || tenant::descends_from(segment, slot, other);
    let holds = |index: usize| {
        let word = segment.devices[index].gate().load();
        !word.is_open() && is_of(word.holder())
    };
    let is_isolated =
        |other: usize| segment.tenants[other].isolation() != IsolationWord::NONE && is_of(other);
    device::with_regions(segment).any(holds) || segment.live_tenants.iter().any(is_isolated)
}

/// Takes `off` off a thread's mask. Returns those that it could not be kept off.
fn narrow(tenant: &Tenant, thread: i32, off: &CpuSet) -> CpuSet {
    let Ok(mask) = affinity::get(thread) else {
        return CpuSet::default(); // It has ended.
    };
    if !mask.meets(off) {
        return CpuSet::default();
    }
    let rest = mask.without(off);
    if !rest.is_empty() {
        note(tenant, &mask);
        match affinity::set(thread, &rest) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => {}
            _ => return CpuSet::default(),
        }
    }
    mask.intersection(off)
}

/// Writes the first mask down that had to do without reserved CPUs.
fn note(tenant: &Tenant, mask: &CpuSet) {
    let [free, starting, live] =
        [SlotState::Free, SlotState::Starting, SlotState::Live].map(|it| it as u64);
    let word = &tenant.narrowed;
    // Relaxed: a look; the exchange decides who writes.
    if word.load(Ordering::Relaxed) == free
        && word.compare_exchange(free, starting, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    {
        tenant.before.set(mask);
        // Release: partner of the Acquire in `before`.
        word.store(live, Ordering::Release);
    }
}

/// That mask, if there was one.
pub fn before(tenant: &Tenant) -> Option<CpuSet> {
    // Acquire: partner of the Release in `note`.
    let is_known = tenant.narrowed.load(Ordering::Acquire) == SlotState::Live as u64;
    is_known.then(|| tenant.before.get())
}

/// Gives every thread of a tenant that does without `off`, and otherwise has the mask of before,
/// that one back: krex is taken out of use.
pub fn give_back(segment: &Layout, slot: usize, off: &CpuSet, processes: &mut ProcessTable) {
    let Some(before) = before(&segment.tenants[slot]).filter(|it| it.meets(off)) else { return };
    let rest = before.without(off);
    for thread in members::of(segment, slot, processes).into_iter().flat_map(|it| it.threads) {
        if affinity::get(thread).is_ok_and(|mask| mask == rest)
            && let Err(error) = affinity::set(thread, &before)
        {
            log::warn!("the CPUs of thread {thread} cannot be given back: {error}");
        }
    }
}
