//! The only cleaner: what dead processes leave behind goes here.

use std::sync::atomic::Ordering;

use krex_core::cgroup::Group;
use krex_core::clock::{self, MILLISECOND, SECOND};
use krex_core::device;
use krex_core::freezer::ProcessTable;
use krex_core::hooks;
use krex_core::layout::SUPERVISORS;
use krex_core::process;
use krex_core::recover::revoke;
use krex_core::tenant::{self, Cleaner};
use krex_core::word::{Cause, OwnerWord, SlotState};

use crate::charge::{Charge, Progress};
use crate::worker::{HOUSEKEEPING, Worker};

/// Tenants of another PID namespace, of which nothing can be seen, are given up when its supervisor
/// has been gone for so long.
const DESERTED: u64 = 5 * SECOND;
/// How often one looks for such.
const DESERTED_INTERVAL: u64 = 20 * MILLISECOND;

impl Worker<'_> {
    /// Sees to tenants whose root process, or last process, has ended.
    pub(crate) fn notice_exits(&mut self, processes: &mut ProcessTable) {
        let mut gone = Vec::new();
        let mut waiting = false;
        for (slot, charge) in &mut self.charges {
            let hinted = self.exits.tenants[*slot].swap(false, Ordering::AcqRel);
            charge.root_ended |= hinted && has_ended(charge);
        }
        let ended: Vec<usize> =
            self.charges.iter().filter(|(_, it)| it.root_ended).map(|(slot, _)| *slot).collect();
        for slot in ended {
            // Its regions first: whoever holds one is the root process. And before those its place
            // in the queue, as `release` does it.
            self.segment.tenants[slot].queue.leave();
            self.end_regions(slot);
            let Some(charge) = self.charges.get_mut(&slot) else { continue };
            // Exits in progress are over soon; a daemon that the root left behind stays.
            let now = clock::now();
            let ended_at = *charge.ended_at.get_or_insert(now);
            if charge.looked_at + HOUSEKEEPING / 2 > now && now > ended_at + SECOND {
                continue;
            }
            charge.looked_at = now;
            if charge.is_populated(processes) || hooks::sabotaged("free_slots") {
                waiting |= now <= ended_at + SECOND;
            } else {
                gone.push(slot);
            }
        }
        for slot in gone {
            if let Some(mut charge) = self.charges.remove(&slot) {
                charge.thaw();
                self.free_submitters();
                log::debug!("{:?} has ended", charge.tenant().name.get());
                tenant::release(self.segment, slot, charge.owner, self.cleaner(), || {
                    self.end_regions(slot)
                });
            }
        }
        if waiting {
            self.wake_at(clock::now() + 20 * MILLISECOND);
        }
    }

    /// What no ring announces.
    pub(crate) fn keep_house(&mut self) {
        let mut processes = ProcessTable::default();
        let highest = self.segment.tenants_used();
        for (slot, tenant) in self.segment.tenants[..highest].iter().enumerate() {
            let owner = tenant.owner();
            if self.is_abandoned(owner) {
                tenant::release(self.segment, slot, owner, self.cleaner(), || {
                    self.end_regions(slot)
                });
            }
        }
        let highest = self.segment.submitters_used();
        for (slot, submitter) in self.segment.submitters[..highest].iter().enumerate() {
            let owner = submitter.owner();
            if self.is_abandoned(owner) {
                self.free_submitter(slot, owner);
            }
        }
        self.free_submitters();
        for (slot, charge) in &mut self.charges {
            // Without a group, who belongs to it must be learned while the tree shows it.
            // What is frozen has no new children.
            if charge.progress == Progress::Running {
                charge.is_populated(&mut processes);
                charge.follow(&mut processes);
            }
            self.exits.tenants[*slot].store(true, Ordering::Release); // ask its pidfd
        }
        crate::keeper::leave_tenants_group();
        if let Some(stat) = process::Stat::of(self.keeper.pid)
            && stat.start_time == self.keeper.start_time
            && stat.is_stopped()
            && !hooks::sabotaged("replace_keeper")
        {
            // It could not take over if this process died: a new one is made.
            log::warn!("the keeper was stopped: replacing it");
            let _ = process::signal_exactly(
                self.keeper.pid,
                self.keeper.start_time,
                rustix::process::Signal::KILL,
            );
        }
    }

    fn cleaner(&self) -> Cleaner {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        Cleaner { pid, supervisor: self.slot }
    }

    /// Whether a slot's owner died while it registered, or its cleaner while it cleaned up. A
    /// starting process is not a dead one.
    fn is_abandoned(&self, owner: OwnerWord) -> bool {
        let state = matches!(owner.state(), SlotState::Starting | SlotState::Ending);
        let mine = state && owner.supervisor() == self.slot;
        mine && process::Stat::of(owner.pid()).is_none_or(|it| it.has_ended())
    }

    /// Frees what a PID namespace left behind that ended as a whole: its supervisor and all its
    /// tenants were killed at once, and nobody of it is left to clean up. That is how containers
    /// usually end. A namespace that lives on has a supervisor again as soon as anybody in it
    /// waits, enters or leaves.
    pub(crate) fn give_up_deserted(&mut self) {
        let now = clock::now();
        if now < self.deserted_at {
            return;
        }
        self.deserted_at = now + DESERTED_INTERVAL;
        for supervisor in (0..SUPERVISORS).filter(|it| *it != self.slot) {
            let tenants: Vec<(usize, OwnerWord)> = self
                .segment
                .live_tenants
                .iter()
                .map(|slot| (slot, self.segment.tenants[slot].owner()))
                .filter(|(_, owner)| owner.supervisor() == supervisor)
                .collect();
            if tenants.is_empty() || self.segment.is_supervisor_alive(supervisor) {
                self.deserted_since[supervisor] = 0;
                continue;
            }
            if self.deserted_since[supervisor] == 0 {
                self.deserted_since[supervisor] = now;
            }
            let key = self.segment.supervisors[supervisor].key.load(Ordering::Acquire);
            // Nobody is invisible to the first namespace.
            let is_gone = now >= self.deserted_since[supervisor] + DESERTED
                || (process::is_in_first_namespace() && !process::is_populated(key));
            for (slot, owner) in tenants {
                let tenant = &self.segment.tenants[slot];
                let group = Group::at(&tenant.cgroup.get()).filter(|it| it.directory.exists());
                match group.map(|it| it.is_populated()) {
                    Some(true) => continue,
                    Some(false) => {}
                    None if is_gone => {}
                    None => continue,
                }
                log::info!("giving up {:?}: its PID namespace has ended", tenant.name.get());
                let devices = tenant.devices.load(Ordering::Acquire);
                if tenant::release(self.segment, slot, owner, self.cleaner(), || {
                    self.end_regions(slot)
                }) {
                    self.acknowledged |= devices;
                }
            }
            for slot in self.segment.live_submitters.iter().filter(|_| is_gone) {
                let owner = self.segment.submitters[slot].owner();
                if owner.supervisor() == supervisor {
                    self.free_submitter(slot, owner);
                }
            }
        }
    }

    /// Ends the regions that a dead tenant holds, and its waiting.
    fn end_regions(&self, slot: usize) {
        for index in device::in_use(self.segment) {
            let gate = self.segment.devices[index].gate();
            let word = gate.load();
            if !word.is_open() && word.holder() == slot && !hooks::sabotaged("revoke_dead") {
                revoke(self.segment, index, word, Cause::Died);
            }
            let queue = &self.segment.tenants[slot].queue;
            if queue.key_for(index).is_some() {
                queue.leave();
                gate.wake();
            }
        }
    }

    /// Frees the slots of submitters that have ended.
    fn free_submitters(&self) {
        for slot in self.segment.live_submitters.iter() {
            let submitter = &self.segment.submitters[slot];
            let owner = submitter.owner();
            let mine = owner.supervisor() == self.slot && owner.state() == SlotState::Live;
            let start_time = submitter.start_time.load(Ordering::Acquire);
            if mine && !process::is_alive(owner.pid(), start_time) {
                self.free_submitter(slot, owner);
            }
        }
    }

    /// Frees a submitter's slot, whose owner was judged to have ended.
    pub(crate) fn free_submitter(&self, slot: usize, judged: OwnerWord) {
        let submitter = &self.segment.submitters[slot];
        if hooks::sabotaged("free_submitters")
            || !tenant::claim_ending(&submitter.owner, judged, self.cleaner())
        {
            return;
        }
        // Threads that it left waiting wait no more.
        let waiting = submitter.waiting_threads.swap(0, Ordering::AcqRel);
        if let Some(tenant) = submitter.tenant().and_then(|it| tenant::resolve(self.segment, it)) {
            tenant.stop_waiting(waiting, clock::now());
        }
        self.segment.live_submitters.remove(slot);
        // Release: whoever claims the slot next comes after all of the above.
        submitter.owner.store(judged.with_state(SlotState::Free).0, Ordering::Release);
    }
}

/// Asks the root's pidfd: it fires when the whole process has ended, waited for or not.
fn has_ended(charge: &Charge<'_>) -> bool {
    let Some(pidfd) = &charge.pidfd else {
        return true;
    };
    let mut poll = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
    let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    matches!(rustix::event::poll(&mut poll, Some(&now)), Ok(1))
}
