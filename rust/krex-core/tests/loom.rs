//! The lock-free part of the protocol, in every order that the memory model allows.
//!
//! Under `--cfg loom` each scenario is walked through once per interleaving, where a sleep that
//! nobody ends is a deadlock. Natively the same scenario runs a few thousand times with real
//! threads and futexes, where such a sleep runs into [`LIMIT`].
//!
//! Loom knows no time-outs, so giving up is something that an actor does. What the actors do is
//! what `client.rs`, `claim.rs`, `region.rs`, `hand_over.rs` and the supervisor do, without segment,
//! processes and clocks.

use std::sync::Arc;
use std::sync::atomic::AtomicU64 as Note; // No part of the protocol: loom must not branch on it.
use std::time::Duration;

use krex_core::bitmap::Bitmap;
use krex_core::flight::Flight;
use krex_core::gate::Gate;
use krex_core::queue::{self, Entry, Key};
use krex_core::sync::{self, AtomicU64, Ordering, Wake};
use krex_core::word::{GateWord, OwnerWord, Phase, SlotState};

/// Longer than any machine stalls.
const LIMIT: Duration = Duration::from_secs(60);

/// Slots of the tenants in the scenarios.
const HOLDER: usize = 0;
const OTHER: usize = 1;

#[cfg(loom)]
thread_local! {
    /// The actor that loom starts with.
    static FIRST: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Runs a scenario of so many actors, under loom with each of them first: loom looks for races by
/// the last access to a word only, so that it misses some when a certain actor is ahead.
#[cfg(loom)]
fn model(actors: usize, scenario: fn()) {
    for first in 0..actors {
        FIRST.set(first);
        let mut builder = loom::model::Builder::new();
        // Bounded, for it to end in seconds; LOOM_MAX_PREEMPTIONS asks for more.
        let preemptions = if actors > 2 { 2 } else { 3 };
        builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
        builder.check(scenario);
    }
}

#[cfg(not(loom))]
fn model(_actors: usize, scenario: fn()) {
    for _ in 0..3000 {
        scenario();
    }
}

/// Runs the actors at the same time, until all are done.
#[cfg(loom)]
fn race<W: Send + Sync + 'static, const N: usize>(world: &Arc<W>, mut actors: [fn(&W); N]) {
    actors.rotate_left((FIRST.get() + 1) % N);
    let (own, others) = actors.split_last().unwrap();
    let threads: Vec<_> = others
        .iter()
        .map(|actor| {
            let (world, actor) = (world.clone(), *actor);
            loom::thread::spawn(move || actor(&world))
        })
        .collect();
    own(world);
    for thread in threads {
        thread.join().unwrap();
    }
}

#[cfg(not(loom))]
fn race<W: Send + Sync, const N: usize>(world: &Arc<W>, actors: [fn(&W); N]) {
    let ready = &Note::new(0);
    std::thread::scope(|scope| {
        for actor in actors {
            scope.spawn(move || {
                // No barrier: whoever is woken from one comes too late to race.
                ready.fetch_add(1, Ordering::SeqCst);
                while ready.load(Ordering::SeqCst) != N as u64 {
                    std::thread::yield_now();
                }
                actor(world);
            });
        }
    });
}

/// What the gate guards: many may use it at one time, or one alone.
#[cfg(loom)]
#[derive(Default)]
struct Guarded(loom::cell::UnsafeCell<()>);

// SAFETY: nothing is in it; loom reports accesses that nothing keeps apart.
#[cfg(loom)]
unsafe impl Sync for Guarded {}

#[cfg(loom)]
impl Guarded {
    fn share(&self) {
        self.0.with(|_| ());
    }

    fn have_alone(&self) {
        self.0.with_mut(|_| ());
    }
}

#[cfg(not(loom))]
#[derive(Default)]
struct Guarded {
    sharing: Note,
    alone: Note,
}

#[cfg(not(loom))]
impl Guarded {
    fn share(&self) {
        self.sharing.fetch_add(1, Ordering::SeqCst);
        assert_eq!(self.alone.load(Ordering::SeqCst), 0, "shared while one had it alone");
        self.sharing.fetch_sub(1, Ordering::SeqCst);
    }

    fn have_alone(&self) {
        assert_eq!(self.alone.fetch_add(1, Ordering::SeqCst), 0, "two had it alone");
        std::hint::spin_loop();
        assert_eq!(self.sharing.load(Ordering::SeqCst), 0, "alone while others shared it");
        self.alone.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A device, its submitters and its tenants.
#[derive(Default)]
struct World {
    gate: Gate,
    guarded: Guarded,
    /// One per process that submits.
    flights: [Flight; 2],
    /// Where whoever drains sleeps.
    doorbell: AtomicU64,
    /// The supervisor's answer for the one tenant that submits, and where the holder waits for it.
    ack: AtomicU64,
    acknowledged: AtomicU64,
    /// One per tenant.
    entries: [Entry; 3],
    clock: AtomicU64,
    /// Whoever leaves opens the gate, though others wait.
    budget_is_spent: bool,
    /// Bit i: tenure i was somebody's.
    tenures: Note,
    /// Submissions that are about to leave, or have left.
    leaving: Note,
}

fn slept(wake: Wake) {
    assert_ne!(wake, Wake::TimedOut, "a wake-up was lost");
}

impl World {
    fn ring(&self) {
        self.doorbell.fetch_add(1, Ordering::SeqCst);
        sync::wake_all(&self.doorbell);
    }

    /// A submission of process `flight`, which waits while the gate is closed.
    fn submit(&self, flight: usize) {
        while let Err(refused) = self.flights[flight].try_enter(&self.gate, |_| false) {
            if refused.was_last {
                self.ring();
            }
            slept(self.gate.wait_change(refused.word, LIMIT));
        }
        self.use_and_leave(flight);
    }

    /// The same with a look first, as `krex.submission()` does.
    fn submit_quickly(&self, flight: usize) {
        if self.flights[flight].try_enter_quickly(&self.gate) {
            self.use_and_leave(flight);
        } else {
            self.submit(flight);
        }
    }

    fn use_and_leave(&self, flight: usize) {
        self.guarded.share();
        self.leaving.fetch_add(1, Ordering::SeqCst);
        if self.flights[flight].leave(&self.gate) {
            self.ring();
        }
    }

    fn drain(&self) {
        for flight in &self.flights {
            loop {
                let rung = self.doorbell.load(Ordering::SeqCst);
                if flight.counts().in_flight == 0 {
                    break;
                }
                slept(sync::wait(&self.doorbell, rung, LIMIT));
            }
        }
    }

    /// Closes the gate with a turn that was granted, has the device alone, and opens it.
    fn hold(&self, granted: GateWord) {
        let bit = 1 << granted.tenure();
        assert_eq!(self.tenures.fetch_or(bit, Ordering::SeqCst) & bit, 0, "granted twice");
        let closing = self.gate.advance(granted, Phase::Closing).unwrap();
        // Only now, or whoever handed over would take it for somebody that gave up. Wakes nobody:
        // those behind find the gate closed, and its opening wakes them.
        self.entries[granted.holder()].leave();
        self.drain();
        // From here on, not only once the swap to `Held` has synchronised some more.
        self.guarded.have_alone();
        let held = self.gate.advance(closing, Phase::Held).unwrap();
        let before = self.flights.each_ref().map(|it| it.counts().completed);
        self.guarded.have_alone();
        let after = self.flights.each_ref().map(|it| it.counts().completed);
        assert_eq!(before, after, "a submission slipped through");
        self.give_up(held);
    }

    /// Hands over to whoever is first in the queue, else opens the gate.
    fn give_up(&self, held: GateWord) {
        let next =
            queue::first(self.entries.iter().enumerate(), 0, 0).filter(|_| !self.budget_is_spent);
        let Some(next) = next else {
            return self.gate.open(held).unwrap();
        };
        let granted = self.gate.hand_over(held, next).unwrap();
        if self.entries[next].key_for(0).is_none() {
            let _ = self.gate.open(granted);
        }
    }

    /// Whether the turn was handed over to the tenant, and is still its to take.
    fn granted_to(&self, tenant: usize) -> Option<GateWord> {
        let word = self.gate.load();
        (word.phase() == Phase::HandedOver && word.holder() == tenant).then_some(word)
    }

    fn grant_and_hold(&self) {
        self.hold(self.gate.try_grant(HOLDER).expect("nobody else wants it"));
    }

    /// What the supervisor of a sibling does until it has answered for `tenure`.
    fn supervise(&self, tenure: u64) {
        loop {
            let rung = self.doorbell.load(Ordering::SeqCst);
            let word = self.gate.load();
            if (word.tenure(), word.phase()) == (tenure, Phase::Closing)
                && self.flights.iter().all(|it| it.counts().in_flight == 0)
            {
                break;
            }
            slept(sync::wait(&self.doorbell, rung, LIMIT));
        }
        self.ack.store(tenure, Ordering::Release);
        self.acknowledged.fetch_add(1, Ordering::Release);
        sync::wake_all(&self.acknowledged);
    }

    fn await_supervisor(&self, tenure: u64) {
        loop {
            let seen = self.acknowledged.load(Ordering::Acquire);
            if self.ack.load(Ordering::Acquire) == tenure {
                break;
            }
            slept(sync::wait(&self.acknowledged, seen, LIMIT));
        }
    }

    fn ahead(&self, key: Key) -> u32 {
        queue::ahead(self.entries.iter().enumerate(), 0, key, 0)
    }

    /// Waits for the turn in the queue, as `claim::claim` does; `place`: it has joined already.
    fn claim(&self, tenant: usize, mut place: Option<Key>) -> GateWord {
        loop {
            let seen = self.gate.load();
            if place.is_none()
                && (!seen.is_open() || self.entries.iter().any(|it| it.key_for(0).is_some()))
            {
                place = Some(self.join(tenant));
                continue;
            }
            if place.is_some() && (seen.phase(), seen.holder()) == (Phase::HandedOver, tenant) {
                return seen;
            }
            let ahead = || place.map_or(0, |key| self.ahead(key));
            if seen.is_open() && ahead() == 0 {
                let Some(granted) = self.gate.try_grant(tenant) else {
                    continue;
                };
                return granted;
            }
            slept(self.gate.wait_while(seen, LIMIT, || !seen.is_open() || ahead() != 0));
        }
    }

    fn join(&self, tenant: usize) -> Key {
        let key = Key::new(0, self.clock.fetch_add(1, Ordering::SeqCst) + 1);
        self.entries[tenant].join(0, key, u64::MAX);
        key
    }

    /// Gives the place in the queue up; a turn that was handed over is given back.
    fn leave_queue(&self, tenant: usize) {
        self.entries[tenant].leave();
        self.gate.wake();
        if let Some(granted) = self.granted_to(tenant)
            && self.gate.open(granted).is_ok()
        {
            self.tenures.fetch_or(1 << granted.tenure(), Ordering::SeqCst);
        }
    }

    fn with_spent_budget() -> Self {
        Self { budget_is_spent: true, ..Self::default() }
    }

    fn claim_and_hold(&self, tenant: usize) {
        self.hold(self.claim(tenant, None));
    }

    /// Everybody has gone: nothing is counted, nobody is queued, each tenure was somebody's.
    fn assert_idle(&self, tenures: u64, submissions: u64) {
        let word = self.gate.load();
        assert_eq!((word.phase(), word.tenure()), (Phase::Open, tenures));
        assert_eq!(self.tenures.load(Ordering::SeqCst), (1 << (tenures + 1)) - 2);
        let counts = self.flights.each_ref().map(Flight::counts);
        assert_eq!(counts.iter().map(|it| it.in_flight).sum::<u64>(), 0);
        assert_eq!(counts.iter().map(|it| it.completed).sum::<u64>(), submissions);
        assert!(self.entries.iter().all(|it| it.key_for(0).is_none()));
    }
}

// --- gate and submissions in flight ---

#[test]
fn a_holder_is_alone() {
    model(2, || {
        let world = Arc::new(World::default());
        race(&world, [|it| it.submit(0), |it: &World| it.grant_and_hold()]);
        world.assert_idle(1, 1);
    });
}

#[test]
fn a_look_first_leaves_no_drain_waiting() {
    model(2, || {
        let world = Arc::new(World::default());
        race(&world, [|it| it.submit_quickly(0), |it: &World| it.grant_and_hold()]);
        world.assert_idle(1, 1);
    });
}

#[test]
fn a_holder_is_alone_each_time() {
    model(2, || {
        let world = Arc::new(World::default());
        race(
            &world,
            [
                |it: &World| {
                    it.submit(0);
                    it.submit(0);
                },
                |it| {
                    it.grant_and_hold();
                    it.grant_and_hold();
                },
            ],
        );
        world.assert_idle(2, 2);
    });
}

#[test]
fn threads_of_one_process_count_together() {
    model(3, || {
        let world = Arc::new(World::default());
        race(&world, [|it| it.submit(0), |it| it.submit(0), |it: &World| it.grant_and_hold()]);
        world.assert_idle(1, 2);
    });
}

#[test]
fn processes_count_apart() {
    model(3, || {
        let world = Arc::new(World::default());
        race(&world, [|it| it.submit(0), |it| it.submit(1), |it: &World| it.grant_and_hold()]);
        world.assert_idle(1, 2);
    });
}

#[test]
fn a_supervisor_drains_for_the_holder() {
    model(3, || {
        let world = Arc::new(World::default());
        race(
            &world,
            [
                |it| it.submit(0),
                |it| it.supervise(1),
                |it: &World| {
                    let granted = it.gate.try_grant(HOLDER).unwrap();
                    let closing = it.gate.advance(granted, Phase::Closing).unwrap();
                    it.ring();
                    it.await_supervisor(1);
                    it.guarded.have_alone();
                    let held = it.gate.advance(closing, Phase::Held).unwrap();
                    it.gate.open(held).unwrap();
                },
            ],
        );
        assert_eq!(world.flights[0].counts().completed, 1);
    });
}

#[test]
fn a_submission_that_was_turned_back_is_never_completed() {
    model(3, || {
        let world = Arc::new(World::default());
        let word = world.gate.try_grant(HOLDER).unwrap();
        race(
            &world,
            [
                |it| {
                    let refused = it.flights[0].try_enter(&it.gate, |_| false).unwrap_err();
                    assert_eq!(refused.word.holder(), HOLDER);
                },
                |it| {
                    it.flights[0].try_enter(&it.gate, |word| word.holder() == HOLDER).unwrap();
                    it.leaving.fetch_add(1, Ordering::SeqCst);
                    it.flights[0].leave(&it.gate);
                },
                |it: &World| {
                    for _ in 0..3 {
                        let counts = it.flights[0].counts();
                        assert!(counts.in_flight <= 2);
                        assert!(counts.completed <= it.leaving.load(Ordering::SeqCst));
                    }
                },
            ],
        );
        let counts = world.flights[0].counts();
        assert_eq!((counts.in_flight, counts.completed), (0, 1));
        assert_eq!(world.gate.load(), word);
    });
}

#[test]
fn what_the_holder_wrote_is_seen_by_whoever_sees_the_gate_closing() {
    #[derive(Default)]
    struct Section {
        gate: Gate,
        deadline: AtomicU64,
    }
    model(2, || {
        let section = Arc::new(Section::default());
        race(
            &section,
            [
                |it| {
                    let granted = it.gate.try_grant(HOLDER).unwrap();
                    it.deadline.store(7, Ordering::Relaxed);
                    it.gate.advance(granted, Phase::Closing).unwrap();
                },
                |it: &Section| {
                    if it.gate.load().phase() == Phase::Closing {
                        assert_eq!(it.deadline.load(Ordering::Relaxed), 7);
                    }
                },
            ],
        );
    });
}

// --- queue ---

#[test]
fn claimers_take_turns() {
    model(2, || {
        let world = Arc::new(World::default());
        race(&world, [|it| it.claim_and_hold(HOLDER), |it: &World| it.claim_and_hold(OTHER)]);
        world.assert_idle(2, 0);
    });
}

#[test]
fn three_claimers_take_turns() {
    model(3, || {
        let world = Arc::new(World::default());
        race(
            &world,
            [
                |it| it.claim_and_hold(0),
                |it| it.claim_and_hold(1),
                |it: &World| it.claim_and_hold(2),
            ],
        );
        world.assert_idle(3, 0);
    });
}

#[test]
fn who_is_ahead_goes_first() {
    model(2, || {
        let world = Arc::new(World::default());
        assert_eq!(world.join(HOLDER), Key::new(0, 1));
        race(
            &world,
            [
                |it| it.hold(it.claim(HOLDER, Some(Key::new(0, 1)))),
                |it: &World| {
                    let granted = it.claim(OTHER, None);
                    assert_eq!(granted.tenure(), 2);
                    it.hold(granted);
                },
            ],
        );
        world.assert_idle(2, 0);
    });
}

#[test]
fn an_opening_gate_wakes_claimers_and_submissions() {
    model(3, || {
        let world = Arc::new(World::with_spent_budget());
        world.gate.try_grant(HOLDER).unwrap();
        race(
            &world,
            [
                |it| it.submit(0),
                |it| it.claim_and_hold(OTHER),
                |it: &World| it.hold(it.gate.load()),
            ],
        );
        world.assert_idle(2, 1);
    });
}

#[test]
fn who_gives_up_at_an_open_gate_wakes_those_behind() {
    model(2, || {
        let world = Arc::new(World::default());
        world.join(OTHER);
        race(&world, [|it| it.leave_queue(OTHER), |it: &World| it.claim_and_hold(HOLDER)]);
        assert!(world.gate.load().is_open());
    });
}

#[test]
fn who_gives_up_at_a_closed_gate_wakes_those_behind() {
    model(3, || {
        let world = Arc::new(World::with_spent_budget());
        world.gate.try_grant(2).unwrap();
        world.join(OTHER);
        race(
            &world,
            [
                |it| it.leave_queue(OTHER),
                |it| it.claim_and_hold(HOLDER),
                |it: &World| it.hold(it.gate.load()),
            ],
        );
        world.assert_idle(2, 0);
    });
}

#[test]
fn who_comes_and_gives_up_holds_up_nobody() {
    model(2, || {
        let world = Arc::new(World::with_spent_budget());
        race(
            &world,
            [
                |it| {
                    it.join(OTHER);
                    it.leave_queue(OTHER);
                },
                |it: &World| it.claim_and_hold(HOLDER),
            ],
        );
        world.assert_idle(1, 0);
    });
}

#[test]
fn a_place_is_never_taken_for_one_on_another_device() {
    model(2, || {
        let entry = Arc::new(Entry::default());
        race(
            &entry,
            [
                |it| it.join(1, Key::new(0, 1), u64::MAX),
                |it: &Entry| assert_eq!(it.key_for(0), None),
            ],
        );
    });
}

#[test]
fn claimers_take_turns_at_an_opening_gate() {
    model(2, || {
        let world = Arc::new(World::with_spent_budget());
        race(&world, [|it| it.claim_and_hold(HOLDER), |it: &World| it.claim_and_hold(OTHER)]);
        world.assert_idle(2, 0);
    });
}

// --- hand-over ---

#[test]
fn a_turn_is_handed_over_under_a_closed_gate() {
    model(3, || {
        let world = Arc::new(World::default());
        let granted = world.gate.try_grant(HOLDER).unwrap();
        world.join(OTHER);
        assert_eq!(granted.tenure(), 1);
        race(
            &world,
            [
                |it| it.submit(0),
                |it| {
                    let granted = it.claim(OTHER, Some(Key::new(0, 1)));
                    assert_eq!((granted.tenure(), granted.holder()), (2, OTHER));
                    it.hold(granted);
                },
                |it: &World| it.hold(it.gate.load()),
            ],
        );
        world.assert_idle(2, 1);
    });
}

#[test]
fn who_gives_up_while_the_turn_is_handed_over_leaves_the_gate_open() {
    model(3, || {
        let world = Arc::new(World::default());
        world.gate.try_grant(HOLDER).unwrap();
        world.join(OTHER);
        race(
            &world,
            [|it| it.submit(0), |it| it.leave_queue(OTHER), |it: &World| it.hold(it.gate.load())],
        );
        assert!(world.gate.load().is_open());
        assert_eq!(world.flights[0].counts().completed, 1);
    });
}

#[test]
fn who_gives_up_while_the_turn_is_handed_over_holds_up_nobody_behind() {
    model(3, || {
        let world = Arc::new(World::default());
        world.gate.try_grant(HOLDER).unwrap();
        world.join(OTHER);
        race(
            &world,
            [
                |it| it.leave_queue(OTHER),
                |it| it.claim_and_hold(2),
                |it: &World| it.hold(it.gate.load()),
            ],
        );
        assert!(world.gate.load().is_open());
    });
}

#[test]
fn of_a_turn_handed_over_and_one_taken_on_another_device_one_sees_the_other() {
    #[derive(Default)]
    struct Devices {
        gates: [Gate; 2],
        conflicts: Note,
    }
    impl Devices {
        fn look(&self, other: usize) {
            if !self.gates[other].load().is_open() {
                self.conflicts.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
    model(2, || {
        let devices = Arc::new(Devices::default());
        let held = devices.gates[0].try_grant(HOLDER).unwrap();
        let held = devices.gates[0].advance(held, Phase::Held).unwrap();
        assert_eq!(held, GateWord::new(1, HOLDER, Phase::Held));
        race(
            &devices,
            [
                |it| {
                    it.gates[0].hand_over(GateWord::new(1, HOLDER, Phase::Held), OTHER).unwrap();
                    it.look(1);
                },
                |it: &Devices| {
                    it.gates[1].try_grant(2).unwrap();
                    // The holder of the first device is none of its concern, the next one is.
                    if it.gates[0].load().holder() == OTHER {
                        it.look(0);
                    }
                },
            ],
        );
        assert_ne!(devices.conflicts.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_turn_handed_over_to_the_dead_is_taken_back() {
    model(3, || {
        let world = Arc::new(World::default());
        world.gate.try_grant(HOLDER).unwrap();
        world.join(OTHER);
        race(
            &world,
            [
                |it| it.submit(0),
                // The cleaner of a tenant that died in the queue: the place first, then the gate.
                |it| {
                    it.entries[OTHER].leave();
                    let word = it.gate.load();
                    if !word.is_open() && word.holder() == OTHER {
                        let _ = it.gate.open(word);
                    }
                },
                |it: &World| it.hold(it.gate.load()),
            ],
        );
        assert!(world.gate.load().is_open());
    });
}

#[test]
fn of_two_granted_on_two_devices_one_sees_the_other() {
    #[derive(Default)]
    struct Devices {
        gates: [Gate; 2],
        conflicts: Note,
    }
    impl Devices {
        fn grant_and_look(&self, own: usize) {
            self.gates[own].try_grant(own).unwrap();
            if !self.gates[1 - own].load().is_open() {
                self.conflicts.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
    model(2, || {
        let devices = Arc::new(Devices::default());
        race(&devices, [|it| it.grant_and_look(0), |it: &Devices| it.grant_and_look(1)]);
        assert_ne!(devices.conflicts.load(Ordering::SeqCst), 0);
    });
}

// --- revocation ---

/// Tenure 1, which its holder ends or somebody revokes.
#[derive(Default)]
struct Tenure {
    gate: Gate,
    cause: AtomicU64,
    ended: Note,
    revoked: Note,
}

impl Tenure {
    fn granted() -> Arc<Self> {
        let tenure = Self::default();
        tenure.gate.try_grant(HOLDER).unwrap();
        Arc::new(tenure)
    }

    fn word(phase: Phase) -> GateWord {
        GateWord::new(1, HOLDER, phase)
    }

    fn run_region(&self) {
        for (from, to) in [
            (Phase::Granted, Phase::Closing),
            (Phase::Closing, Phase::Held),
            (Phase::Held, Phase::Leaving),
        ] {
            if self.gate.advance(Self::word(from), to).is_err() {
                self.learn_of_revocation();
                return;
            }
        }
        match self.gate.open(Self::word(Phase::Leaving)) {
            Ok(()) => _ = self.ended.fetch_add(1, Ordering::SeqCst),
            Err(_) => self.learn_of_revocation(),
        }
    }

    fn learn_of_revocation(&self) {
        assert_eq!(self.cause.load(Ordering::Relaxed), 1, "revoked without a cause");
        for phase in [Phase::Granted, Phase::Closing, Phase::Held, Phase::Leaving] {
            let word = self.gate.open(Self::word(phase)).unwrap_err();
            assert!(word.is_open() || word.tenure() > 1);
        }
    }

    fn revoke(&self) {
        loop {
            let word = self.gate.load();
            if word.is_open() || word.tenure() != 1 {
                return;
            }
            self.cause.store(1, Ordering::Relaxed);
            if self.gate.open(word).is_ok() {
                self.ended.fetch_add(1, Ordering::SeqCst);
                self.revoked.store(1, Ordering::SeqCst);
            }
        }
    }

    /// The next holder, whom nobody disturbs.
    fn succeed(&self) {
        let mut word = loop {
            match self.gate.try_grant(OTHER) {
                Some(word) => break word,
                None => {
                    let seen = self.gate.load();
                    if !seen.is_open() {
                        slept(self.gate.wait_change(seen, LIMIT));
                    }
                }
            }
        };
        assert_eq!(word.tenure(), 2);
        for phase in [Phase::Closing, Phase::Held] {
            word = self.gate.advance(word, phase).unwrap();
        }
        self.gate.open(word).unwrap();
    }
}

#[test]
fn a_tenure_ends_once() {
    model(3, || {
        let tenure = Tenure::granted();
        race(&tenure, [|it| it.revoke(), |it| it.revoke(), |it: &Tenure| it.run_region()]);
        assert_eq!(tenure.ended.load(Ordering::SeqCst), 1);
        assert_eq!(tenure.gate.load().tenure(), 1);
        assert!(tenure.gate.load().is_open());
    });
}

#[test]
fn who_was_revoked_cannot_touch_a_later_tenure() {
    model(3, || {
        let tenure = Tenure::granted();
        race(&tenure, [|it| it.run_region(), |it| it.revoke(), |it: &Tenure| it.succeed()]);
        assert_eq!(tenure.ended.load(Ordering::SeqCst), 1);
        assert_eq!(tenure.gate.load(), GateWord::new(2, OTHER, Phase::Open));
    });
}

// --- slots ---

/// A slot that a process takes while another closes the gate.
#[derive(Default)]
struct Slots {
    world: World,
    live: Bitmap<1>,
    owner: AtomicU64,
    listed: Note,
    turned_back: Note,
    claimed: Note,
}

const STARTING: OwnerWord = OwnerWord::new(1, 42, 0, SlotState::Starting);
const LIVE: OwnerWord = STARTING.with_state(SlotState::Live);
const NEXT: OwnerWord = OwnerWord::new(2, 43, 0, SlotState::Starting);

impl Slots {
    /// As `tenant::register` does, up to its first look at the gate.
    fn register(&self) {
        self.owner.store(STARTING.0, Ordering::Release);
        self.live.insert(0);
        self.owner.store(LIVE.0, Ordering::SeqCst);
        sync::fence_between();
        let closed = !self.world.gate.load().is_open();
        self.turned_back.store(closed.into(), Ordering::SeqCst);
    }

    /// As `Client::claim_submitter` does, then submits.
    fn submit(&self) {
        self.owner.store(STARTING.0, Ordering::Release);
        self.world.flights[0].reset();
        self.live.insert(0);
        self.owner.store(LIVE.0, Ordering::SeqCst);
        self.world.submit(0);
    }

    /// As `tenant::release` does, for an owner that was judged when it was live.
    fn release(&self) {
        let ending = LIVE.with_state(SlotState::Ending).0;
        let is_ours =
            self.owner.compare_exchange(LIVE.0, ending, Ordering::AcqRel, Ordering::Relaxed);
        if is_ours.is_ok() {
            self.live.remove(0);
            self.owner.store(LIVE.with_state(SlotState::Free).0, Ordering::Release);
        }
    }

    /// As `tenant::claim` does.
    fn claim(&self) {
        let seen = OwnerWord(self.owner.load(Ordering::Acquire));
        let is_ours = seen.is_free()
            && self
                .owner
                .compare_exchange(seen.0, NEXT.0, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        if is_ours {
            self.live.insert(0);
            self.claimed.store(1, Ordering::SeqCst);
        }
    }

    fn is_listed(&self) -> bool {
        let owner = || OwnerWord(self.owner.load(Ordering::SeqCst));
        self.live.iter().any(|slot| slot == 0 && owner().state() == SlotState::Live)
    }

    fn close(&self) -> GateWord {
        let granted = self.world.gate.try_grant(HOLDER).unwrap();
        self.world.gate.advance(granted, Phase::Closing).unwrap()
    }
}

#[test]
fn a_new_tenant_is_listed_or_turned_back() {
    model(2, || {
        let slots = Arc::new(Slots::default());
        race(
            &slots,
            [
                |it| it.register(),
                |it: &Slots| {
                    it.close();
                    it.listed.store(it.is_listed().into(), Ordering::SeqCst);
                },
            ],
        );
        let seen = |note: &Note| note.load(Ordering::SeqCst) == 1;
        assert!(seen(&slots.listed) || seen(&slots.turned_back));
    });
}

#[test]
fn a_new_submitter_is_counted_or_turned_back() {
    model(2, || {
        let slots = Arc::new(Slots::default());
        race(
            &slots,
            [
                |it| it.submit(),
                |it: &Slots| {
                    let closing = it.close();
                    if it.is_listed() {
                        it.world.drain();
                    }
                    it.world.guarded.have_alone();
                    it.world.gate.open(closing).unwrap();
                },
            ],
        );
    });
}

#[test]
fn slots_come_and_go_without_touching_each_other() {
    model(3, || {
        let live = Arc::new(Bitmap::<1>::default());
        live.insert(2);
        race(&live, [|it| it.insert(0), |it| it.insert(1), |it: &Bitmap<1>| it.remove(2)]);
        assert_eq!(live.iter().collect::<Vec<_>>(), [0, 1]);
    });
}

#[test]
fn a_slot_is_freed_once_and_its_next_owner_stays_listed() {
    model(3, || {
        let slots = Arc::new(Slots::default());
        slots.owner.store(LIVE.0, Ordering::Relaxed);
        slots.live.insert(0);
        race(&slots, [|it| it.release(), |it| it.release(), |it: &Slots| it.claim()]);
        let owner = OwnerWord(slots.owner.load(Ordering::SeqCst));
        let is_claimed = slots.claimed.load(Ordering::SeqCst) == 1;
        let expected = if is_claimed { NEXT } else { LIVE.with_state(SlotState::Free) };
        assert_eq!(owner, expected);
        assert_eq!(slots.live.iter().next().is_some(), is_claimed);
    });
}
