//! Judging a region's holder: dead, late, stuck in its grant, or stalled.
//!
//! The stall breaker: frozen siblings can hold what the holder needs: a file lock, a pipe, a
//! compile cache's server. Then the holder runs on no CPU for as long as they are frozen.

use std::sync::atomic::Ordering;

use krex_core::clock::{self, MILLISECOND, SECOND};
use krex_core::device;
use krex_core::drain;
use krex_core::freezer::ProcessTable;
use krex_core::hooks;
use krex_core::layout::TENANTS;
use krex_core::process;
use krex_core::recover::{revoke, ring_for};
use krex_core::tenant;
use krex_core::word::{Cause, GateWord, OwnerWord, Phase, Reference};

use crate::charge::Progress;
use crate::worker::Worker;

/// How long a grant may stay unused: its holder has stopped.
const GRANT_LIMIT: u64 = SECOND / 2;
/// A holder that ran on no CPU for this long is stalled.
pub const STALL_LIMIT: u64 = 250 * MILLISECOND;
/// How often one looks.
pub const SAMPLE_INTERVAL: u64 = 50 * MILLISECOND;
/// Less than this between two looks is no progress: polling a lock takes a little, too.
const LEAST: u64 = MILLISECOND / 2;

/// The last look at one device's holder.
#[derive(Clone, Copy, Debug)]
pub struct Watched {
    word: GateWord,
    /// As last read, in nanoseconds; zero before the first look.
    cpu_time: u64,
    /// The same for what is quickly had.
    quick_cpu_time: u64,
    pub sampled_at: u64,
    /// When it last was seen to have run.
    progress_at: u64,
}

impl Watched {
    /// Begins to watch the tenure of `word`.
    pub fn begin(word: GateWord, now: u64) -> Self {
        Self { word, cpu_time: 0, quick_cpu_time: 0, sampled_at: now, progress_at: now }
    }

    /// Whether a quick look is enough: the holder's root process has run since the last.
    pub fn ran(&mut self, quick_cpu_time: u64, now: u64) -> bool {
        let ran = quick_cpu_time > self.quick_cpu_time;
        self.quick_cpu_time = quick_cpu_time;
        if ran {
            self.sampled_at = now;
            self.progress_at = now;
        }
        ran
    }

    pub fn is_about(&self, word: GateWord) -> bool {
        self.word == word
    }

    /// Takes another look; returns for how long the holder has not run.
    pub fn look(&mut self, cpu_time: u64, now: u64) -> u64 {
        // Less than before: somebody ended, and what it used went with it. That is progress.
        if cpu_time < self.cpu_time || cpu_time - self.cpu_time >= LEAST {
            self.progress_at = now;
        }
        self.cpu_time = cpu_time;
        self.sampled_at = now;
        now - self.progress_at
    }

    /// Gives the holder another [`STALL_LIMIT`]: something was done for it.
    pub fn restart(&mut self, now: u64) {
        self.progress_at = now;
    }
}

impl Worker<'_> {
    /// Revokes a holder that is dead, late, or stuck in its grant; watches one that runs.
    pub(crate) fn judge_holder(
        &mut self,
        index: usize,
        word: GateWord,
        processes: &mut ProcessTable,
    ) {
        if word.is_open() {
            self.watched[index] = None;
            return;
        }
        let now = clock::now();
        let section = &self.segment.devices[index];
        let holder = self.segment.tenants.get(word.holder());
        if holder.is_none_or(|it| it.owner().is_free()) && !hooks::sabotaged("revoke_dead") {
            revoke(self.segment, index, word, Cause::Died);
            return;
        }
        let deadline = match (word.phase(), holder) {
            (phase, _) if phase.is_granted() => self.seen[index].1 + GRANT_LIMIT,
            // A gate of its user's own is held without limit.
            _ if section.name.starts_with(device::GATE_PREFIX) => u64::MAX,
            (_, Some(holder)) => holder.holding.hold_deadline.load(Ordering::Acquire),
            (_, None) => 0,
        };
        // The deadline may be a later tenure's by now; the swap on `word` then fails.
        if now >= deadline && !hooks::sabotaged("revoke_late") {
            self.note_miss(word);
            revoke(self.segment, index, word, Cause::Deadline);
            return;
        }
        self.wake_at(deadline);
        // What krex stopped is not its own fault.
        let runs =
            self.charges.get(&word.holder()).is_some_and(|it| it.progress == Progress::Running);
        if word.phase() != Phase::Held && runs {
            // These take moments; one who is stopped in them would keep everybody frozen.
            let since = self.seen[index].1 + SAMPLE_INTERVAL;
            self.wake_at(since.max(now + SAMPLE_INTERVAL / 5));
            let pid = holder.map_or(0, |it| it.owner().pid());
            let is_stopped = || process::Stat::of(pid).is_some_and(|it| it.is_stopped());
            if now >= since && !hooks::sabotaged("stall_breaker") && is_stopped() {
                self.note_miss(word);
                revoke(self.segment, index, word, Cause::Stalled);
                return;
            }
        }
        if word.phase() == Phase::Held && self.charges.contains_key(&word.holder()) {
            self.watch_holder(index, word, now, processes);
        }
    }

    /// Whoever does not take its grant though it could is granted nothing more before it shows
    /// itself.
    fn note_miss(&self, word: GateWord) {
        let Some(holder) = self.segment.tenants.get(word.holder()) else { return };
        let could = holder.frozen_since.load(Ordering::Acquire) == 0
            || !self.segment.is_supervisor_alive(holder.owner().supervisor());
        if word.phase().is_granted() && could {
            holder.queue.miss();
        }
    }

    /// The stall breaker.
    fn watch_holder(
        &mut self,
        index: usize,
        word: GateWord,
        now: u64,
        processes: &mut ProcessTable,
    ) {
        let others = |slot: usize| {
            let tenant = &self.segment.tenants[slot];
            slot != word.holder()
                && tenant.shares(index)
                && !tenant::descends_from(self.segment, slot, word.holder())
        };
        let siblings: Vec<usize> =
            self.segment.live_tenants.iter().filter(|slot| others(*slot)).collect();
        if siblings.is_empty() || hooks::sabotaged("stall_breaker") {
            return;
        }
        let due = match &self.watched[index] {
            Some(watched) if watched.is_about(word) => watched.sampled_at + SAMPLE_INTERVAL,
            _ => 0,
        };
        if now < due {
            self.wake_at(due);
            return;
        }
        self.wake_at(now + SAMPLE_INTERVAL);
        match &mut self.watched[index] {
            Some(watched) if watched.is_about(word) => {
                let quick = self.charges.get(&word.holder()).and_then(|it| it.quick_cpu_time());
                if quick.is_some_and(|quick| watched.ran(quick, now)) {
                    return;
                }
            }
            other => {
                // Nothing is read in the first moments: the holder is warming up.
                *other = Some(Watched::begin(word, now));
                return;
            }
        }
        let cpu_time = self.holders_cpu_time(word.holder(), processes);
        let has_gpu_work = self.has_gpu_work(index, word.holder());
        let Some(watched) = &mut self.watched[index] else { return };
        if has_gpu_work {
            watched.restart(now);
        }
        if watched.look(cpu_time, now) < STALL_LIMIT {
            return;
        }
        watched.restart(now);
        let section = &self.segment.devices[index];
        if section.stalled_tenure.load(Ordering::Acquire) != word.tenure() {
            log::info!("the holder of {} ran on no CPU: thawing its siblings", section.name.get());
            // Release: partner of the Acquire in every supervisor's `wanted`.
            section.stalled_tenure.fetch_max(word.tenure(), Ordering::Release);
            ring_for(self.segment, siblings.iter().copied());
            return;
        }
        let waits =
            |slot: &usize| self.segment.tenants[*slot].waiting_threads.load(Ordering::Acquire) > 0;
        if siblings.iter().any(waits) {
            revoke(self.segment, index, word, Cause::Stalled);
        }
    }

    /// Whether the holder waits for the GPU: in the driver, or at the end of its region.
    fn has_gpu_work(&self, index: usize, holder: usize) -> bool {
        drain::family(self.segment, index, holder).any(|it| {
            it.in_flight() > 0
                || it.device_waits.load(Ordering::Relaxed) > 0
                || it.drain.is_pending()
        })
    }

    /// CPU time of the holder and its descendants, as far as they are in this one's charge.
    fn holders_cpu_time(&mut self, holder: usize, processes: &mut ProcessTable) -> u64 {
        let segment = self.segment;
        let family = |slot: usize| slot == holder || tenant::descends_from(segment, slot, holder);
        self.charges
            .iter_mut()
            .filter(|(slot, _)| family(**slot))
            .map(|(_, charge)| charge.cpu_time(processes))
            .sum()
    }

    /// The holder's process id as this namespace numbers it, if its ancestors are in the tenant
    /// in `slot`.
    pub(crate) fn holder_below(&self, slot: usize, word: GateWord) -> Option<i32> {
        let holder = self.segment.tenants.get(word.holder())?.owner();
        if holder.supervisor() == self.slot {
            let descends = tenant::descends_from(self.segment, word.holder(), slot);
            return descends.then_some(holder.pid());
        }
        let pid = (*self.foreign.get(&holder.0)?)?;
        let root = self.charges.get(&slot)?.owner.pid();
        process::ancestors(pid).any(|it| it.pid == root).then_some(pid)
    }

    /// Recognises a tenant of another PID namespace that lies below one of ours: it then is its
    /// descendant, though it could not know. Once for each: it means to go through all processes.
    pub(crate) fn recognise(&mut self, slot: usize, owner: OwnerWord) {
        if self.foreign.contains_key(&owner.0) || self.charges.is_empty() {
            return;
        }
        if self.foreign.len() >= TENANTS {
            self.foreign.clear();
        }
        let supervisor = self.segment.supervisors.get(owner.supervisor());
        let key = supervisor.map_or(0, |it| it.key.load(Ordering::Acquire));
        let pid = process::find_foreign(key, owner.pid());
        self.foreign.insert(owner.0, pid);
        let tenant = &self.segment.tenants[slot];
        // The search takes a while: is it still the same tenant?
        let is_same = tenant.owner() == owner;
        let (Some(pid), None, true) = (pid, tenant.parent(), is_same) else { return };
        let parent = process::ancestors(pid).find_map(|ancestor| {
            let found = self.charges.iter().find(|(_, it)| it.owner.pid() == ancestor.pid);
            found.map(|(slot, it)| Reference { slot: *slot, generation: it.owner.generation() })
        });
        // Release: partner of the Acquire in `Tenant::parent`. Only this namespace's supervisor
        // can know it, so that nobody else writes here.
        tenant.parent.store(Reference::pack(parent), Ordering::Release);
        if parent.is_some() {
            device::with_regions(self.segment)
                .for_each(|it| self.segment.devices[it].gate().wake());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use krex_core::word::Phase;

    #[test]
    fn a_holder_that_does_not_run_is_noticed_and_one_that_does_is_not() {
        let word = GateWord::new(1, 0, Phase::Held);
        let mut idle = Watched::begin(word, 0);
        assert_eq!(idle.look(LEAST * 2, 0), 0, "the first look only begins");
        assert_eq!(idle.look(LEAST * 2, STALL_LIMIT), STALL_LIMIT);
        assert_eq!(idle.look(LEAST * 3, 2 * STALL_LIMIT), 0);
        assert_eq!(idle.look(5, 3 * STALL_LIMIT), 0, "a child ended");
        assert_eq!(
            idle.look(5 + LEAST - 1, 4 * STALL_LIMIT),
            STALL_LIMIT,
            "polling is no progress"
        );
        idle.restart(4 * STALL_LIMIT);
        assert_eq!(idle.look(5 + LEAST - 1, 4 * STALL_LIMIT + 7), 7);
    }
}
