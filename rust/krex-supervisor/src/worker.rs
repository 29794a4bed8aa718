//! The half of a supervisor that freezes and thaws.
//!
//! Level-triggered: a ring of the doorbell (or a time that has come) means "look again". Each
//! round reads the gates, computes what should be so for every tenant in its charge, and takes
//! the next step towards it. Nothing is remembered that could not be computed afresh, except how
//! far a step is.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use krex_core::affinity::CpuSet;
use krex_core::clock::{self, MILLISECOND, SECOND};
use krex_core::device;
use krex_core::freezer::ProcessTable;
use krex_core::isolate;
use krex_core::layout::{DEVICES, SUPERVISORS, TENANTS};
use krex_core::process;
use krex_core::reservation;
use krex_core::segment::Segment;
use krex_core::sync;
use krex_core::word::{GateWord, SlotState};
use rustix::event::epoll;

use crate::charge::{Charge, Progress};
use crate::exits::{Exits, KEEPER};
use crate::holder::Watched;

/// How often everything is looked at while anybody is frozen: the leaver may have died between
/// opening the gate and ringing.
pub(crate) const WHILE_FROZEN: u64 = 50 * MILLISECOND;
/// The same otherwise, rung or not.
pub(crate) const HOUSEKEEPING: u64 = SECOND;
/// A pair without tenants ends after this.
const LINGER: u64 = 3 * SECOND;

/// Why a worker ended its work.
#[derive(Debug, PartialEq, Eq)]
pub enum End {
    /// There is no tenant any more, or the segment was purged.
    Unused,
    /// The keeper died: this process is to take its place.
    KeeperDied,
}

pub struct Worker<'a> {
    pub(crate) segment: &'a Segment,
    pub(crate) slot: usize,
    pub(crate) keeper: process::Stat,
    pub(crate) exits: Arc<Exits>,
    pub(crate) charges: BTreeMap<usize, Charge<'a>>,
    /// Per device: the gate's word as last seen, and since when it is that.
    pub(crate) seen: [(GateWord, u64); DEVICES],
    pub(crate) watched: [Option<Watched>; DEVICES],
    /// Per owner of a slot in another PID namespace: its process id here, if it is below.
    pub(crate) foreign: BTreeMap<u64, Option<i32>>,
    pub(crate) housekeeping_at: u64,
    /// Per supervisor slot: since when nobody serves it though it has tenants.
    pub(crate) deserted_since: [u64; SUPERVISORS],
    pub(crate) deserted_at: u64,
    pub(crate) unused_since: Option<u64>,
    /// What is reserved for all devices together, as of the fingerprint of the reservations.
    pub(crate) reserved: (u64, CpuSet),
    /// The doorbell before this round.
    pub(crate) rung: u64,
    /// Bit i: something was acknowledged for device i in this round.
    pub(crate) acknowledged: u64,
    /// When this round wants the next one.
    pub(crate) next: u64,
}

impl<'a> Worker<'a> {
    /// # Errors
    /// If epoll or a thread cannot be had.
    pub fn new(segment: &'a Segment, slot: usize, keeper: process::Stat) -> std::io::Result<Self> {
        let exits = Arc::new(Exits {
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
            foreign: BTreeMap::new(),
            housekeeping_at: 0,
            deserted_since: [0; SUPERVISORS],
            deserted_at: 0,
            unused_since: None,
            reserved: (0, CpuSet::default()),
            rung: 0,
            acknowledged: 0,
            next: 0,
        })
    }

    /// Works until there is nothing to do any more, or the keeper is gone.
    pub fn run(mut self, segment: &'static Segment) -> End {
        let (exits, slot) = (self.exits.clone(), self.slot);
        let spawned = std::thread::Builder::new()
            .name("krex-exits".to_owned())
            .stack_size(64 * 1024)
            .spawn(move || exits.wait(segment, slot));
        if let Err(error) = spawned {
            log::error!("no thread: {error}; exits are noticed once a second");
        }
        let doorbell = &self.segment.supervisors[self.slot].doorbell;
        loop {
            // SeqCst, and before the round: a ring that comes during it ends the wait at once.
            self.rung = doorbell.load(Ordering::SeqCst);
            if self.exits.keeper.load(Ordering::Acquire) {
                return End::KeeperDied;
            }
            self.round();
            if self.segment.is_retired() {
                for charge in self.charges.values_mut() {
                    charge.thaw();
                }
                self.give_cpus_back();
                return End::Unused;
            }
            if self.is_unused() {
                return End::Unused;
            }
            let pause = self.next.saturating_sub(clock::now());
            if pause > 0 {
                sync::wait(doorbell, self.rung, Duration::from_nanos(pause));
            }
        }
    }

    pub(crate) fn wake_at(&mut self, time: u64) {
        self.next = self.next.min(time);
    }

    /// One look at everything.
    fn round(&mut self) {
        let now = clock::now();
        self.next = now + HOUSEKEEPING;
        if now >= self.housekeeping_at {
            self.housekeeping_at = now + HOUSEKEEPING;
            self.keep_house();
            isolate::restore_leftovers(self.segment, self.slot);
            for charge in self.charges.values_mut() {
                charge.kept_off = 0; // Its threads may have given themselves other masks.
            }
        }
        self.adopt();
        self.give_up_deserted();
        self.notice_exits(&mut ProcessTable::default());
        for index in device::in_use(self.segment) {
            let word = self.segment.devices[index].gate().load();
            if self.seen[index].0 != word {
                self.seen[index] = (word, now);
            }
        }
        // Read, if at all, after the gates: what is seen in it holds for the phases seen.
        let mut processes = ProcessTable::default();
        for index in device::in_use(self.segment) {
            let word = self.seen[index].0;
            self.judge_holder(index, word, &mut processes);
        }
        self.restore_masks();
        let slots: Vec<usize> = self.charges.keys().copied().collect();
        for slot in &slots {
            self.settle(*slot, &mut processes);
        }
        self.settle_splitting();
        self.tell_holders();
        self.keep_off_reserved(&mut processes);
        self.settle_masks();
        self.enforce_limits(&mut processes);
        if self.charges.values().any(|it| it.progress != Progress::Running) {
            self.wake_at(now + WHILE_FROZEN);
        }
    }

    /// Takes new tenants into charge.
    fn adopt(&mut self) {
        let mut foreign = Vec::new();
        for slot in self.segment.live_tenants.iter() {
            let owner = self.segment.tenants[slot].owner();
            if owner.state() != SlotState::Live {
                continue;
            }
            if owner.supervisor() != self.slot {
                foreign.push((slot, owner));
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
        foreign.into_iter().for_each(|(slot, owner)| self.recognise(slot, owner));
        // A slot that was freed by others (purged, or given back by a launcher that failed).
        self.charges.retain(|slot, charge| {
            let keep = self.segment.tenants[*slot].owner() == charge.owner;
            if !keep {
                charge.thaw();
            }
            keep
        });
    }

    /// Whether the pair has had no tenant for a while, and none comes at the last moment.
    fn is_unused(&mut self) -> bool {
        let used = || {
            self.segment.tenants[..self.segment.tenants_used()].iter().any(|it| {
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
        reservation::forget_unused(self.segment);
        true
    }
}
