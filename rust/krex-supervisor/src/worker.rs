//! The half of a supervisor that freezes and thaws.
//!
//! Level-triggered: a ring of the doorbell (or a time that has come) means "look again". Each
//! round reads the gates, computes what should be so for every tenant in its charge, and takes
//! the next step towards it. Nothing is remembered that could not be computed afresh, except how
//! far a step is.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use krex_core::cgroup::Group;
use krex_core::clock::{self, MILLISECOND, SECOND};
use krex_core::device;
use krex_core::freezer::ProcessTable;
use krex_core::hooks;
use krex_core::layout::{DEVICES, SUPERVISORS, TENANTS};
use krex_core::process;
use krex_core::recover::{revoke, ring_for};
use krex_core::segment::Segment;
use krex_core::supervision;
use krex_core::sync;
use krex_core::tenant;
use krex_core::word::{Ack, Cause, Drained, Frozen, GateWord, Obstacle, Phase, SlotState, Stage};
use rustix::event::epoll;

use crate::charge::{Charge, Extent, Failure, Progress};
use crate::progress::{SAMPLE_INTERVAL, STALL_LIMIT, Watched};

/// How often everything is looked at, rung or not.
const HOUSEKEEPING: u64 = SECOND;
/// The same while anybody is frozen: a leaver that dies between opening the gate and ringing.
const WHILE_FROZEN: u64 = 50 * MILLISECOND;
/// How soon a freeze that has begun is looked at again.
const WHILE_FREEZING: u64 = 50_000;
/// How long a grant may stay unused: its holder has stopped.
const GRANT_LIMIT: u64 = SECOND;
/// A pair without tenants ends after this.
const LINGER: u64 = 3 * SECOND;
/// Tenants of another PID namespace are given up when its supervisor has been gone for so long.
const DESERTED: u64 = 10 * SECOND;
/// From SIGTERM to SIGKILL at a tenant's time limit.
const GRACE: u64 = 5 * SECOND;

/// Why a worker ended its work.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// There is no tenant any more, or the segment was purged.
    Unused,
    /// The keeper died: this process is to take its place.
    KeeperDied,
}

/// Root processes, and the keeper, that have ended: noted by the thread that waits for pidfds.
struct Exits {
    epoll: OwnedFd,
    tenants: [AtomicBool; TENANTS],
    keeper: AtomicBool,
}

const KEEPER: u64 = TENANTS as u64;

pub struct Worker<'a> {
    segment: &'a Segment,
    slot: usize,
    keeper: process::Stat,
    exits: std::sync::Arc<Exits>,
    charges: BTreeMap<usize, Charge<'a>>,
    /// Per device: the gate's word as last seen, and since when it is that.
    seen: [(GateWord, u64); DEVICES],
    watched: [Option<Watched>; DEVICES],
    /// Per owner of a slot in another PID namespace that held a region: its process id here.
    foreign_holders: BTreeMap<u64, Option<i32>>,
    housekeeping_at: u64,
    /// Per supervisor slot: since when nobody serves it though it has tenants.
    deserted_since: [u64; SUPERVISORS],
    unused_since: Option<u64>,
    /// When this round wants the next one.
    next: u64,
}

impl<'a> Worker<'a> {
    /// # Errors
    /// If epoll or a thread cannot be had.
    pub fn new(segment: &'a Segment, slot: usize, keeper: process::Stat) -> std::io::Result<Self> {
        let exits = std::sync::Arc::new(Exits {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            tenants: [const { AtomicBool::new(false) }; TENANTS],
            keeper: AtomicBool::new(false),
        });
        match process::open_exactly(keeper.pid, keeper.start_time) {
            Some(pidfd) => {
                exits.watch(&pidfd, KEEPER)?;
                // It stays open for as long as this process lives.
                std::mem::forget(pidfd);
            }
            None => exits.keeper.store(true, Ordering::Release),
        }
        Ok(Self {
            segment,
            slot,
            keeper,
            exits,
            charges: BTreeMap::new(),
            seen: [(GateWord(0), 0); DEVICES],
            watched: [None; DEVICES],
            foreign_holders: BTreeMap::new(),
            housekeeping_at: 0,
            deserted_since: [0; SUPERVISORS],
            unused_since: None,
            next: 0,
        })
    }

    /// Waits for ended processes, and rings; the body of the worker's second thread.
    fn wait_for_exits(exits: &Exits, segment: &Segment, slot: usize) {
        let mut buffer = Vec::with_capacity(64);
        loop {
            buffer.clear();
            match epoll::wait(&exits.epoll, rustix::buffer::spare_capacity(&mut buffer), None) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    log::error!("epoll_wait: {error}");
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            for event in &buffer {
                let index = event.data.u64();
                let flag = if index == KEEPER {
                    &exits.keeper
                } else {
                    &exits.tenants[index as usize % TENANTS]
                };
                // Release: a mere hint; the worker asks the pidfd itself.
                flag.store(true, Ordering::Release);
            }
            supervision::ring(segment, slot);
        }
    }

    /// Works until there is nothing to do any more, or the keeper is gone.
    pub fn run(mut self, segment: &'static Segment) -> End {
        let (exits, slot) = (self.exits.clone(), self.slot);
        let spawned = std::thread::Builder::new()
            .name("krex-exits".to_owned())
            .stack_size(64 * 1024)
            .spawn(move || Self::wait_for_exits(&exits, segment, slot));
        if let Err(error) = spawned {
            log::error!("no thread: {error}; exits are noticed once a second");
        }
        let doorbell = &self.segment.supervisors[self.slot].doorbell;
        loop {
            // SeqCst, and before the round: a ring that comes during it ends the wait at once.
            let rung = doorbell.load(Ordering::SeqCst);
            if self.exits.keeper.load(Ordering::Acquire) {
                return End::KeeperDied;
            }
            self.round();
            if self.segment.is_retired() {
                for charge in self.charges.values_mut() {
                    charge.thaw();
                }
                return End::Unused;
            }
            if self.is_unused() {
                return End::Unused;
            }
            let pause = self.next.saturating_sub(clock::now());
            if pause > 0 {
                sync::wait(doorbell, rung, Duration::from_nanos(pause));
            }
        }
    }

    fn wake_at(&mut self, time: u64) {
        self.next = self.next.min(time);
    }

    /// One look at everything.
    fn round(&mut self) {
        let now = clock::now();
        self.next = now + HOUSEKEEPING;
        let mut processes = ProcessTable::default();
        if now >= self.housekeeping_at {
            self.housekeeping_at = now + HOUSEKEEPING;
            self.keep_house(&mut processes);
        }
        self.adopt();
        self.notice_exits(&mut processes);
        for index in device::in_use(self.segment) {
            let word = self.segment.devices[index].gate().load();
            if self.seen[index].0 != word {
                self.seen[index] = (word, now);
            }
            self.find_foreign_holder(word);
            self.judge_holder(index, word, &mut processes);
        }
        let slots: Vec<usize> = self.charges.keys().copied().collect();
        for slot in &slots {
            self.settle(*slot, &mut processes);
        }
        self.enforce_limits(&mut processes);
        if self.charges.values().any(|it| it.progress != Progress::Running) {
            self.wake_at(now + WHILE_FROZEN);
        }
    }

    /// Takes new tenants into charge.
    fn adopt(&mut self) {
        for slot in self.segment.live_tenants.iter() {
            let owner = self.segment.tenants[slot].owner();
            if owner.supervisor() != self.slot || owner.state() != SlotState::Live {
                continue;
            }
            if self.charges.get(&slot).is_some_and(|it| it.owner == owner) {
                continue;
            }
            self.exits.tenants[slot].store(false, Ordering::Release);
            let charge = Charge::new(self.segment, self.slot, slot, owner);
            if let Some(pidfd) = &charge.pidfd
                && let Err(error) = self.exits.watch(pidfd, slot as u64)
            {
                log::warn!("the end of {} is noticed late: {error}", owner.pid());
            }
            log::debug!("took {:?} ({}) in charge", charge.tenant().name.get(), owner.pid());
            self.charges.insert(slot, charge);
        }
        // A slot that was freed by others (purged, or given back by a launcher that failed).
        self.charges.retain(|slot, charge| {
            let keep = self.segment.tenants[*slot].owner() == charge.owner;
            if !keep {
                charge.thaw();
            }
            keep
        });
    }

    /// Sees to tenants whose root process, or last process, has ended.
    fn notice_exits(&mut self, processes: &mut ProcessTable) {
        let mut gone = Vec::new();
        let mut waiting = false;
        for (slot, charge) in &mut self.charges {
            let hinted = self.exits.tenants[*slot].load(Ordering::Acquire);
            charge.root_ended |= hinted && has_ended(charge);
        }
        let ended: Vec<usize> =
            self.charges.iter().filter(|(_, it)| it.root_ended).map(|(slot, _)| *slot).collect();
        for slot in ended {
            // Its regions first: whoever holds one is the root process.
            self.end_regions(slot);
            let Some(charge) = self.charges.get_mut(&slot) else { continue };
            if charge.is_populated(processes) || hooks::sabotaged("free_slots") {
                waiting = true;
            } else {
                gone.push(slot);
            }
        }
        for slot in gone {
            if let Some(mut charge) = self.charges.remove(&slot) {
                charge.thaw();
                self.free_submitters(true);
                log::debug!("{:?} has ended", charge.tenant().name.get());
                tenant::release(self.segment, slot, charge.owner);
            }
        }
        if waiting {
            // Exits in progress, or processes that the root left behind.
            self.wake_at(clock::now() + 20 * MILLISECOND);
        }
    }

    /// Frees the slots of submitters that have ended. Returns whether there were any.
    fn free_submitters(&self, all: bool) -> bool {
        let mut freed = false;
        if hooks::sabotaged("free_submitters") {
            return false;
        }
        for slot in self.segment.live_submitters.iter() {
            let submitter = &self.segment.submitters[slot];
            let owner = submitter.owner();
            let mine = owner.supervisor() == self.slot && owner.state() == SlotState::Live;
            if !mine || !(all || submitter.flight().counts().in_flight > 0) {
                continue;
            }
            if process::is_alive(owner.pid(), submitter.start_time.load(Ordering::Acquire)) {
                continue;
            }
            self.free_submitter(slot);
            freed = true;
        }
        freed
    }

    /// Revokes a holder that is dead, late, or stuck in its grant; watches one that runs.
    fn judge_holder(&mut self, index: usize, word: GateWord, processes: &mut ProcessTable) {
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
        let deadline = if word.phase() == Phase::Granted {
            self.seen[index].1 + GRANT_LIMIT
        } else {
            section.hold_deadline.load(Ordering::Acquire)
        };
        // The deadline may be a later tenure's by now; the swap on `word` then fails.
        if now >= deadline && !hooks::sabotaged("revoke_late") {
            revoke(self.segment, index, word, Cause::Deadline);
            return;
        }
        self.wake_at(deadline);
        if word.phase() == Phase::Held && self.charges.contains_key(&word.holder()) {
            self.watch_holder(index, word, now, processes);
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
        let cpu_time = self.holders_cpu_time(word.holder(), processes);
        let watched = match &mut self.watched[index] {
            Some(watched) if watched.is_about(word) => watched,
            other => other.insert(Watched::begin(word, cpu_time, now)),
        };
        if watched.look(cpu_time, now) < STALL_LIMIT {
            return;
        }
        watched.restart(now);
        let section = &self.segment.devices[index];
        if section.stalled_tenure.load(Ordering::Acquire) != word.tenure() {
            log::info!("the holder of {} ran on no CPU: thawing its siblings", section.name.get());
            // Release: partner of the Acquire in every supervisor's `wanted`.
            section.stalled_tenure.store(word.tenure(), Ordering::Release);
            ring_for(self.segment, siblings.iter().copied());
            return;
        }
        let waits =
            |slot: &usize| self.segment.tenants[*slot].waiting_threads.load(Ordering::Acquire) > 0;
        if siblings.iter().any(waits) {
            revoke(self.segment, index, word, Cause::Stalled);
        }
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

    /// What should be frozen of the tenant in `slot`, and for which devices. `None`: nothing.
    fn wanted(&self, slot: usize) -> Option<(Extent, Vec<(usize, GateWord)>)> {
        let tenant = &self.segment.tenants[slot];
        let mut extent = Extent::Whole;
        let mut causes = Vec::new();
        for index in device::with_regions(self.segment) {
            let word = self.seen[index].0;
            if word.is_open() {
                continue;
            }
            if word.holder() == slot && !hooks::sabotaged("spare_holder") {
                return None; // A tenant that holds a region on any device is never frozen.
            }
            let closed = matches!(word.phase(), Phase::Closing | Phase::Held | Phase::Leaving);
            let stalled = self.segment.devices[index].stalled_tenure.load(Ordering::Acquire);
            let given_up = {
                let ack = tenant.ack(index);
                ack.tenure == word.tenure()
                    && ack.stage >= Stage::Settled
                    && ack.frozen == Frozen::No
            };
            if !closed
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
            causes.push((index, word));
        }
        (!causes.is_empty()).then_some((extent, causes))
    }

    /// The holder's process id as this namespace numbers it, if its ancestors are in the tenant
    /// in `slot`.
    fn holder_below(&self, slot: usize, word: GateWord) -> Option<i32> {
        let holder = self.segment.tenants[word.holder()].owner();
        if holder.supervisor() == self.slot {
            let descends = tenant::descends_from(self.segment, word.holder(), slot);
            return descends.then_some(holder.pid());
        }
        let pid = (*self.foreign_holders.get(&holder.0)?)?;
        let root = self.charges.get(&slot)?.owner.pid();
        process::ancestors(pid).any(|it| it.pid == root).then_some(pid)
    }

    /// Looks for a holder of another PID namespace, which may lie below one of our tenants. Once
    /// for each: it means to go through all processes.
    fn find_foreign_holder(&mut self, word: GateWord) {
        let Some(holder) = self.segment.tenants.get(word.holder()).map(|it| it.owner()) else {
            return;
        };
        let concerned = !word.is_open() && !self.charges.is_empty();
        if !concerned || holder.supervisor() == self.slot {
            return;
        }
        if self.foreign_holders.len() >= TENANTS {
            self.foreign_holders.clear();
        }
        self.foreign_holders.entry(holder.with_state(SlotState::Live).0).or_insert_with(|| {
            let supervisor = self.segment.supervisors.get(holder.supervisor());
            let key = supervisor.map_or(0, |it| it.key.load(Ordering::Acquire));
            process::find_foreign(key, holder.pid())
        });
    }

    /// Takes a tenant the next step towards what should be.
    fn settle(&mut self, slot: usize, processes: &mut ProcessTable) {
        let Some((extent, causes)) = self.wanted(slot) else {
            if let Some(charge) = self.charges.get_mut(&slot) {
                charge.thaw();
            }
            return;
        };
        let mut drained = Vec::new();
        for (index, word) in &causes {
            drained.push(self.drain(slot, *index, *word));
        }
        let Some(charge) = self.charges.get_mut(&slot) else {
            return;
        };
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
            result = charge.start(extent, processes);
        } else if matches!(charge.progress, Progress::Freezing { .. }) {
            result = charge.carry_on(processes);
        }
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
                self.acknowledge(slot, index, word, drained, outcome);
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
        let section = &self.segment.devices[index];
        let deadline = section.drain_deadline.load(Ordering::Acquire);
        let is_late = clock::now() >= deadline;
        let mut in_flight = false;
        for submitter in self.segment.live_submitters.iter() {
            let submitter = &self.segment.submitters[submitter];
            let counts = submitter.flight().counts();
            let concerned = counts.in_flight > 0
                && submitter.device.load(Ordering::Relaxed) == index as u64
                && submitter.tenant().is_some_and(|it| it.slot == slot);
            if !concerned {
                continue;
            }
            let stuck = submitter.stuck_at.load(Ordering::Relaxed) == counts.completed + 1;
            if is_late {
                submitter.stuck_at.store(counts.completed + 1, Ordering::Relaxed);
            }
            if is_late || stuck {
                return Some(Drained::TimedOut);
            }
            in_flight = true;
        }
        let charge = self.charges.get_mut(&slot)?;
        if in_flight {
            charge.was_in_flight[index] = word.tenure();
            if self.free_submitters(false) {
                self.wake_at(clock::now());
            }
            self.wake_at(deadline.min(clock::now() + WHILE_FROZEN));
            hooks::fault("draining");
            return None;
        }
        Some(if charge.was_in_flight[index] == word.tenure() {
            Drained::Counted
        } else {
            Drained::Idle
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
    ) {
        let tenant = &self.segment.tenants[slot];
        let section = &self.segment.devices[index];
        let mut ack = tenant.ack(index);
        if ack.tenure != word.tenure() || ack.stage == Stage::None {
            section.drained_at.fetch_max(clock::now(), Ordering::AcqRel);
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
            // A fresh table: the round's may be from before somebody continued it.
            ack.disturbed |= !charge.is_still_frozen(&mut ProcessTable::default());
            ack.stage = Stage::Verified;
        } else {
            return;
        }
        hooks::fault("acknowledging");
        // Release: partner of the Acquire in the holder's reading of the count below.
        tenant.acks[index].store(ack.pack(), Ordering::Release);
        section.acknowledged.fetch_add(1, Ordering::Release);
        sync::wake_all(&section.acknowledged);
    }

    /// Ends tenants whose time limit is over, with all that were split off from them.
    fn enforce_limits(&mut self, processes: &mut ProcessTable) {
        let now = clock::now();
        let limited = |charge: &Charge<'_>| charge.tenant().time_limit.load(Ordering::Acquire) != 0;
        let slots: Vec<usize> =
            self.charges.iter().filter(|(_, it)| limited(it)).map(|(slot, _)| *slot).collect();
        for slot in slots {
            let segment = self.segment;
            let family: Vec<usize> = self
                .charges
                .keys()
                .copied()
                .filter(|it| *it == slot || tenant::descends_from(segment, *it, slot))
                .collect();
            let killing = match self.charges[&slot].terminated_at {
                Some(terminated_at) if now >= terminated_at + GRACE => true,
                Some(terminated_at) => {
                    self.wake_at(terminated_at + GRACE);
                    continue;
                }
                None => {
                    let tenant = &segment.tenants[slot];
                    // What one of them was kept from, the command as a whole was.
                    let excluded = family.iter().map(|it| segment.tenants[*it].time_excluded(now));
                    let since = tenant.registered_at.load(Ordering::Acquire);
                    let used =
                        now.saturating_sub(since).saturating_sub(excluded.max().unwrap_or(0));
                    let limit = tenant.time_limit.load(Ordering::Acquire);
                    if used < limit {
                        self.wake_at(now + (limit - used));
                        continue;
                    }
                    self.wake_at(now + GRACE);
                    false
                }
            };
            for member in family {
                if let Some(charge) = self.charges.get_mut(&member) {
                    charge.terminated_at.get_or_insert(now);
                    charge.end(killing, processes);
                }
            }
        }
    }

    /// What no ring announces.
    fn keep_house(&mut self, processes: &mut ProcessTable) {
        for (slot, tenant) in self.segment.tenants.iter().enumerate() {
            let owner = tenant.owner();
            // Died while it registered. A starting process is not a dead one.
            let mine = owner.supervisor() == self.slot && owner.state() == SlotState::Starting;
            if mine && process::Stat::of(owner.pid()).is_none_or(|it| it.has_ended()) {
                tenant::release(self.segment, slot, owner);
            }
        }
        for (slot, submitter) in self.segment.submitters.iter().enumerate() {
            let owner = submitter.owner();
            let mine = owner.supervisor() == self.slot && owner.state() == SlotState::Starting;
            if mine && process::Stat::of(owner.pid()).is_none_or(|it| it.has_ended()) {
                self.free_submitter(slot);
            }
        }
        self.free_submitters(true);
        for (slot, charge) in &mut self.charges {
            // Without a group, who belongs to it must be learned while the tree shows it.
            charge.is_populated(processes);
            self.exits.tenants[*slot].store(true, Ordering::Release); // ask its pidfd
        }
        self.give_up_deserted();
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

    /// Frees what a PID namespace left behind that ended as a whole: its supervisor and all its
    /// tenants were killed at once, and nobody of it is left to clean up. A namespace that lives
    /// on has a supervisor again as soon as anybody in it waits, enters or leaves.
    fn give_up_deserted(&mut self) {
        let now = clock::now();
        for supervisor in (0..SUPERVISORS).filter(|it| *it != self.slot) {
            let tenants: Vec<usize> = self
                .segment
                .live_tenants
                .iter()
                .filter(|slot| self.segment.tenants[*slot].owner().supervisor() == supervisor)
                .collect();
            if tenants.is_empty() || self.segment.is_supervisor_alive(supervisor) {
                self.deserted_since[supervisor] = 0;
                continue;
            }
            let since = match self.deserted_since[supervisor] {
                0 => now,
                since => since,
            };
            self.deserted_since[supervisor] = since;
            if now < since + DESERTED {
                continue;
            }
            for slot in tenants {
                let tenant = &self.segment.tenants[slot];
                let group = Group::at(&tenant.cgroup.get());
                if group.is_some_and(|group| group.is_populated()) {
                    continue;
                }
                log::warn!("giving up {:?}: nobody serves it any more", tenant.name.get());
                self.end_regions(slot);
                tenant::release(self.segment, slot, tenant.owner());
            }
            for slot in self.segment.live_submitters.iter() {
                let submitter = &self.segment.submitters[slot];
                if submitter.owner().supervisor() == supervisor {
                    self.free_submitter(slot);
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

    fn free_submitter(&self, slot: usize) {
        let submitter = &self.segment.submitters[slot];
        let owner = submitter.owner();
        self.segment.live_submitters.remove(slot);
        // AcqRel: whoever claims the slot next comes after the removal. It fails only if
        // somebody freed it already.
        let free = owner.with_state(SlotState::Free).0;
        let _ =
            submitter.owner.compare_exchange(owner.0, free, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Whether the pair has had no tenant for a while, and none comes at the last moment.
    fn is_unused(&mut self) -> bool {
        let used = || {
            self.segment.tenants.iter().any(|it| {
                let owner = it.owner();
                owner.supervisor() == self.slot && !owner.is_free()
            })
        };
        if !self.charges.is_empty() || used() {
            self.unused_since = None;
            return false;
        }
        let now = clock::now();
        let since = *self.unused_since.get_or_insert(now);
        if now < since + LINGER {
            self.wake_at(since + LINGER);
            return false;
        }
        // SeqCst: the handshake with a registration, which makes its slot live and then looks at
        // the session again: either it finds the session over, or the second look finds it.
        let session = &self.segment.supervisors[self.slot].session;
        session.fetch_add(1, Ordering::SeqCst);
        if used() {
            session.fetch_add(1, Ordering::SeqCst);
            self.unused_since = None;
            return false;
        }
        true
    }
}

impl Exits {
    fn watch(&self, pidfd: &impl AsFd, index: u64) -> rustix::io::Result<()> {
        epoll::add(
            &self.epoll,
            pidfd,
            epoll::EventData::new_u64(index),
            epoll::EventFlags::IN | epoll::EventFlags::ONESHOT,
        )
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
