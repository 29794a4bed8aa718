//! Keeping tenants off reserved CPUs, which are for holders alone.
//!
//! `krex run` takes them off its own mask before it becomes the command; supervisors do it for
//! processes that attached themselves, for all their tenants when a device gets its reservation,
//! and once a second for threads that gave themselves another mask since. A tenant in a region is
//! left alone, and all below it: `isolate.rs` has their masks in hand.
//!
//! What a thread had before is kept per tenant, so that it can be given back if krex is taken out
//! of use. A thread that may use no other CPUs stays, and the verdict of regions says so.

use std::sync::atomic::Ordering;

use crate::affinity::{self, CpuSet};
use crate::device;
use crate::freezer::ProcessTable;
use crate::hooks;
use crate::layout::{Layout, Tenant};
use crate::members;
use crate::reservation;
use crate::tenant;

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
    let mut is_off = true;
    for member in members::of(segment, slot, processes) {
        for thread in member.threads {
            // Looked at before each: it may enter at any moment. Who is moved in the moment in
            // between runs elsewhere than its region wants, once, and is put right at its end.
            if is_in_region(segment, slot) {
                return false;
            }
            is_off &= hooks::sabotaged("keep_off") || narrow(tenant, thread, off);
        }
    }
    // Release: partner of the Acquire in the holder's report.
    tenant.on_reserved.store(u64::from(!is_off), Ordering::Release);
    true
}

/// Whether a tenant, or one that it descends from, holds a region or is about to.
pub fn is_in_region(segment: &Layout, slot: usize) -> bool {
    device::with_regions(segment).any(|index| {
        let word = segment.devices[index].gate().load();
        let holder = word.holder();
        !word.is_open() && (holder == slot || tenant::descends_from(segment, slot, holder))
    })
}

/// Takes `off` off a thread's mask; whether the thread is off them now.
fn narrow(tenant: &Tenant, thread: i32, off: &CpuSet) -> bool {
    let Ok(mask) = affinity::get(thread) else {
        return true; // It has ended.
    };
    if !mask.meets(off) {
        return true;
    }
    let rest = mask.without(off);
    !rest.is_empty() && note(tenant, &mask, off) && affinity::set(thread, &rest).is_ok()
}

/// Writes down which mask had to do without `off`. Returns whether there was room. Only one writes
/// at a time: the process itself before it becomes the command, after that its supervisor.
fn note(tenant: &Tenant, mask: &CpuSet, off: &CpuSet) -> bool {
    let rest = mask.without(off);
    for place in &tenant.narrowed {
        let known = place.get();
        if known.is_empty() {
            place.set(mask);
            return true;
        }
        if known.without(off) == rest {
            return true;
        }
    }
    false
}

/// Gives every thread of a tenant that had to do without `off` its own mask back: krex is taken
/// out of use.
pub fn give_back(segment: &Layout, slot: usize, off: &CpuSet, processes: &mut ProcessTable) {
    let masks: Vec<CpuSet> = segment.tenants[slot].narrowed.iter().map(|it| it.get()).collect();
    if off.is_empty() || masks.iter().all(CpuSet::is_empty) {
        return;
    }
    for thread in members::of(segment, slot, processes).into_iter().flat_map(|it| it.threads) {
        let Ok(mask) = affinity::get(thread) else { continue };
        let before = masks.iter().find(|it| !it.is_empty() && it.without(off) == mask);
        if let Some(before) = before
            && let Err(error) = affinity::set(thread, before)
        {
            log::warn!("the CPUs of thread {thread} cannot be given back: {error}");
        }
    }
}
