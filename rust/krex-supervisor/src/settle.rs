//! What should be frozen, and the next step towards it: steps 3 to 5 for the siblings.

use std::sync::atomic::Ordering;

use krex_core::cgroup;
use krex_core::clock;
use krex_core::device;
use krex_core::drain::coverage;
use krex_core::freezer::ProcessTable;
use krex_core::hooks;
use krex_core::layout::DEVICES;
use krex_core::process;
use krex_core::recover;
use krex_core::sync;
use krex_core::tenant;
use krex_core::word::{
    Ack, DrainOutcome, Drained, Frozen, GateWord, Obstacle, Phase, Reference, SlotState, Stage,
};

use crate::charge::{Extent, Failure, Progress};
use crate::worker::{WHILE_FROZEN, Worker};

/// How soon a freeze that has begun is looked at again.
const WHILE_FREEZING: u64 = 50_000;

/// What should become of a tenant.
enum Wanted {
    Running,
    /// The turn is being handed over under the closed gate: who is frozen stays so, and who runs,
    /// such as the last holder, runs until the next one closes.
    AsItIs,
    /// To this extent, for these devices.
    Frozen(Extent, Vec<(usize, GateWord)>),
}

impl Worker<'_> {
    /// What should become of the tenant in `slot`.
    fn wanted(&self, slot: usize) -> Wanted {
        let tenant = &self.segment.tenants[slot];
        let mut extent = Extent::Whole;
        let mut causes = Vec::new();
        let (mut handed_over, mut has_turn) = (false, false);
        for index in device::with_regions(self.segment) {
            let word = self.seen[index].0;
            if word.is_open() {
                continue;
            }
            if word.holder() == slot && !hooks::sabotaged("spare_holder") {
                if word.phase().is_granted() {
                    has_turn = true;
                    continue; // What another device's region wants of it comes first.
                }
                return Wanted::Running; // A tenant that holds a region is never frozen.
            }
            let stalled = self.segment.devices[index].stalled_tenure.load(Ordering::Acquire);
            let given_up = {
                let ack = tenant.ack(index);
                ack.tenure == word.tenure()
                    && ack.stage >= Stage::Settled
                    && ack.frozen == Frozen::No
            };
            if word.phase() == Phase::Granted
                || !tenant.shares(index)
                || stalled == word.tenure()
                || given_up
                || tenant::descends_from(self.segment, slot, word.holder())
            {
                continue;
            }
            if let Some(holder) = self.holder_below(slot, word)
                && !hooks::sabotaged("spare_ancestors")
            {
                extent = Extent::Around { holder };
            }
            match word.phase() {
                Phase::HandedOver => handed_over = true,
                _ => causes.push((index, word)),
            }
        }
        match (causes.is_empty(), handed_over && !has_turn, extent) {
            (false, _, _) => Wanted::Frozen(extent, causes),
            (true, true, Extent::Whole) => Wanted::AsItIs,
            // Also the next holder, and what has its ancestors in it: they run for it to begin.
            (true, _, _) => Wanted::Running,
        }
    }

    /// Takes a tenant the next step towards what should be.
    pub(crate) fn settle(&mut self, slot: usize, processes: &mut ProcessTable) {
        let (extent, causes) = match self.wanted(slot) {
            Wanted::Frozen(extent, causes) => (extent, causes),
            Wanted::AsItIs => return,
            Wanted::Running => return self.thaw(slot),
        };
        let tenant = &self.segment.tenants[slot];
        let is_new = |(index, word): &(usize, GateWord)| tenant.ack(*index).tenure != word.tenure();
        let Some(charge) = self.charges.get_mut(&slot) else {
            return;
        };
        if matches!(charge.progress, Progress::Frozen { .. })
            && causes.iter().any(is_new)
            && !charge.is_still_frozen(processes)
        {
            // Frozen for an earlier tenure, and continued by somebody since.
            charge.thaw();
        }
        let mut drained = Vec::new();
        for (index, word) in &causes {
            drained.push(self.drain(slot, *index, *word));
        }
        let Some(charge) = self.charges.get_mut(&slot) else { return };
        let reached = match charge.progress {
            Progress::Frozen { extent: reached } | Progress::Freezing { extent: reached, .. } => {
                Some(reached)
            }
            Progress::Running => None,
        };
        let mut result = Ok(());
        if reached != Some(extent) {
            if drained.iter().any(Option::is_none) {
                return; // Frozen now, its threads in flight could never leave.
            }
            if reached.is_some() {
                self.thaw(slot); // To another extent: what is frozen by now runs for a moment.
            }
            let Some(charge) = self.charges.get_mut(&slot) else { return };
            result = charge.start(extent, processes);
        } else if matches!(charge.progress, Progress::Freezing { .. }) {
            result = charge.carry_on(processes);
        }
        let Some(charge) = self.charges.get_mut(&slot) else { return };
        let outcome = match (result, charge.progress) {
            (Err(Failure(obstacle)), _) => (Frozen::No, obstacle),
            (Ok(()), Progress::Frozen { extent }) => (charge.frozen_name(extent), Obstacle::None),
            (Ok(()), _) => {
                self.wake_at(clock::now() + WHILE_FREEZING);
                return;
            }
        };
        for ((index, word), drained) in causes.into_iter().zip(drained) {
            if let Some(drained) = drained {
                self.acknowledge(slot, index, word, drained, outcome, processes);
            }
        }
    }

    /// Thaws a tenant. If that is in the middle of a region, its verdict has to say so, except
    /// where the stall breaker does.
    fn thaw(&mut self, slot: usize) {
        let Some(charge) = self.charges.get_mut(&slot) else { return };
        if matches!(charge.progress, Progress::Frozen { .. }) {
            for index in device::with_regions(self.segment) {
                let stalled = self.segment.devices[index].stalled_tenure.load(Ordering::Acquire);
                recover::note_thaw(self.segment, slot, index, Some(stalled));
            }
        }
        charge.thaw();
    }

    /// Acknowledges those that were frozen with the tenant from which they were just splitting off:
    /// they cannot finish that before they are thawed.
    pub(crate) fn settle_splitting(&mut self) {
        for slot in self.segment.live_tenants.iter() {
            let tenant = &self.segment.tenants[slot];
            let owner = tenant.owner();
            if owner.state() != SlotState::Starting || owner.supervisor() != self.slot {
                continue;
            }
            let Some(parent) = tenant.parent().and_then(|it| self.charges.get(&it.slot)) else {
                continue;
            };
            let Progress::Frozen { extent } = parent.progress else { continue };
            let with_parent = || {
                let path = cgroup::path_of(&owner.pid().to_string()).unwrap_or_default();
                process::Stat::of(owner.pid()).is_some_and(|it| it.is_stopped())
                    || (extent == Extent::Whole && path == parent.tenant().cgroup.get())
            };
            for index in device::with_regions(self.segment) {
                let word = self.seen[index].0;
                let mut ack = tenant.ack(index);
                let is_first = ack.tenure != word.tenure() || ack.stage == Stage::None;
                let is_second = word.phase() == Phase::Leaving && ack.stage == Stage::Settled;
                let closed = !word.is_open() && !word.phase().is_granted();
                if !closed || !tenant.shares(index) || !(is_first || is_second) {
                    continue;
                }
                if is_first && with_parent() {
                    ack = Ack {
                        stage: Stage::Settled,
                        drained: Drained::Idle,
                        frozen: parent.frozen_name(extent),
                        ..Ack::none(word.tenure())
                    };
                } else if is_second {
                    ack.disturbed |= !with_parent();
                    ack.stage = Stage::Verified;
                } else {
                    continue; // It has moved out, and will be a tenant of its own in a moment.
                }
                // Release: partner of the Acquire in the holder's reading.
                tenant.acks[index].store(ack.pack(), Ordering::Release);
                self.acknowledged |= 1 << index;
            }
        }
    }

    /// Steps 3 and 4 for one tenant: how it was drained, or `None` while it is not.
    fn drain(&mut self, slot: usize, index: usize, word: GateWord) -> Option<Drained> {
        let tenant = &self.segment.tenants[slot];
        let ack = tenant.ack(index);
        if ack.tenure == word.tenure() && ack.stage >= Stage::Settled {
            return Some(ack.drained);
        }
        if hooks::sabotaged("drain") {
            return Some(Drained::Idle);
        }
        let is_frozen = self
            .charges
            .get(&slot)
            .is_some_and(|it| matches!(it.progress, Progress::Frozen { .. }));
        // Frozen since it was drained for the last holder. What it counts in flight now it was
        // frozen in the middle of being turned back with.
        let was_drained = is_frozen
            && ack.tenure + 1 == word.tenure()
            && ack.stage >= Stage::Settled
            && !matches!(ack.drained, Drained::No | Drained::TimedOut);
        let holder = self.segment.tenants.get(word.holder())?;
        // It may be of a later tenure by now; then this one is over.
        let deadline = holder.holding.drain_deadline.load(Ordering::Acquire);
        let is_late = clock::now() >= deadline;
        let (mut in_flight, mut timed_out) = (false, false);
        let (mut streams, mut failed, mut evict) = (false, false, false);
        let own = Reference { slot, generation: tenant.owner().generation() };
        for place in self.segment.live_submitters.iter() {
            let submitter = &self.segment.submitters[place];
            if submitter.device.load(Ordering::Relaxed) != index as u64
                || submitter.tenant() != Some(own)
            {
                continue;
            }
            if let Some(answer) = submitter.drain.answer_for(word.tenure()) {
                streams = true;
                failed |= answer.outcome == DrainOutcome::Error;
                timed_out |= answer.outcome == DrainOutcome::Incomplete;
            }
            // The counts first: only what has returned from the driver is on a stream.
            let is_inside = submitter.in_flight() > 0 && !was_drained;
            let is_dirty = || {
                submitter.covers(coverage::DRAINS)
                    && !hooks::sabotaged("drain_streams")
                    && submitter.drain.answer_for(word.tenure()).is_none()
                    && submitter.drain.is_dirty(submitter.flight().counts().completed)
            };
            if !is_inside && !is_dirty() {
                submitter.forget_stuck();
                continue;
            }
            let owner = submitter.owner();
            let start_time = submitter.start_time.load(Ordering::Acquire);
            let is_alive = process::is_alive(owner.pid(), start_time);
            if !is_alive && !hooks::sabotaged("free_submitters") {
                self.free_submitter(place, owner); // It was killed inside a submission.
                continue;
            }
            if !is_inside {
                submitter.drain.ask(word.tenure());
            }
            if is_late {
                submitter.give_up(word.tenure());
                if tenant.on_stuck.load(Ordering::Relaxed) != 0 {
                    evict = true;
                }
            }
            // One that was given up before is looked at once; others are waited for.
            if submitter.is_stuck() {
                timed_out = true;
            } else {
                in_flight = true;
            }
        }
        if evict && tenant.evicted.load(Ordering::Relaxed) == 0 {
            log::warn!("{:?} is stuck: ending it", tenant.name.get());
            // It may well end in a moment, if it isn't frozen first: then the region is not disturbed.
            tenant.evicted.store(1, Ordering::Release);
            self.wake_at(clock::now() + WHILE_FROZEN);
            return None;
        }
        let charge = self.charges.get_mut(&slot)?;
        if in_flight {
            charge.was_in_flight[index] = word.tenure();
            self.wake_at(deadline.min(clock::now() + WHILE_FROZEN));
            hooks::fault("draining");
            return None;
        }
        Some(match charge.was_in_flight[index] == word.tenure() {
            _ if timed_out => Drained::TimedOut,
            _ if failed => Drained::Error,
            _ if streams => Drained::Streams,
            true => Drained::Counted,
            false => Drained::Idle,
        })
    }

    /// Tells the holder what was done, and after the region whether it still is so.
    fn acknowledge(
        &mut self,
        slot: usize,
        index: usize,
        word: GateWord,
        drained: Drained,
        (frozen, obstacle): (Frozen, Obstacle),
        processes: &mut ProcessTable,
    ) {
        let tenant = &self.segment.tenants[slot];
        let mut ack = tenant.ack(index);
        if ack.tenure != word.tenure() || ack.stage == Stage::None {
            if let Some(holder) = self.segment.tenants.get(word.holder()) {
                holder.holding.drained_at.fetch_max(clock::now(), Ordering::AcqRel);
            }
            ack = Ack {
                tenure: word.tenure(),
                stage: Stage::Settled,
                drained,
                frozen,
                obstacle,
                disturbed: false,
            };
        } else if word.phase() == Phase::Leaving && ack.stage == Stage::Settled {
            let Some(charge) = self.charges.get_mut(&slot) else {
                return;
            };
            hooks::fault("verifying");
            ack.disturbed |= !charge.is_still_frozen(processes);
            ack.stage = Stage::Verified;
        } else {
            return;
        }
        hooks::fault("acknowledging");
        // Release: partner of the Acquire in the holder's reading.
        tenant.acks[index].store(ack.pack(), Ordering::Release);
        self.acknowledged |= 1 << index;
    }

    /// Wakes the holders for whom something was acknowledged, once each.
    pub(crate) fn tell_holders(&mut self) {
        let devices = std::mem::take(&mut self.acknowledged);
        for index in (0..DEVICES).filter(|index| devices & (1 << index) != 0) {
            let acknowledged = &self.segment.devices[index].acknowledged;
            // Release: partner of the Acquire in `await_stage`, which then finds what was stored.
            acknowledged.fetch_add(1, Ordering::Release);
            sync::wake_all(acknowledged);
        }
    }
}
