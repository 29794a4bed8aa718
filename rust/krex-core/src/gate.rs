//! The gate of a device: one word decides who may submit.
//!
//! Every change is one compare-and-swap on the whole word, so whoever was revoked in the
//! meantime fails its swap and can neither reopen the gate nor move a later tenure on.

use std::time::Duration;

use crate::hooks;
use crate::sync::{self, AtomicU64, Ordering, Wake};
use crate::word::{GateWord, Phase};

/// One device's gate. Lives in shared memory; all zero is an open gate that was never held.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Gate {
    word: AtomicU64,
    /// How many threads sleep, or are about to, so that opening a gate at which nobody waits
    /// costs no system call. A sleeper that is killed leaves its count behind: later openings
    /// then make a wake-up call that finds nobody, and nothing else.
    sleepers: AtomicU64,
    /// Counts the wake-ups: sleepers sleep on it. Not on `word`, since a place in the queue that
    /// is given up changes what they wait for, but not the word.
    bell: AtomicU64,
}

impl Gate {
    /// The word as it is now.
    ///
    /// SeqCst: the reading half of the handshakes with submissions, registrations and sleepers
    /// (see `sync.rs`); it also acquires what the holder published before its last swap.
    #[inline]
    pub fn load(&self) -> GateWord {
        GateWord(self.word.load(Ordering::SeqCst))
    }

    /// Step 1: takes the turn if the gate is open. Wakes nobody.
    pub fn try_grant(&self, holder: usize) -> Option<GateWord> {
        let seen = self.load();
        if !seen.is_open() && !hooks::sabotaged("exclusive") {
            return None;
        }
        let granted = GateWord::new(seen.tenure() + 1, holder, Phase::Granted);
        self.swap(seen, granted).ok()
    }

    /// Ends the holder's tenure and grants the next one, without opening the gate in between.
    ///
    /// # Errors
    /// The word as it is, when the tenure was revoked.
    pub fn hand_over(&self, from: GateWord, next: usize) -> Result<GateWord, GateWord> {
        let granted = GateWord::new(from.tenure() + 1, next, Phase::HandedOver);
        self.swap(from, granted)?;
        self.wake();
        Ok(granted)
    }

    /// Moves the holder's own tenure on to another closed phase.
    ///
    /// # Errors
    /// The word as it is, when the tenure was revoked.
    pub fn advance(&self, from: GateWord, to: Phase) -> Result<GateWord, GateWord> {
        debug_assert!(to != Phase::Open, "use open()");
        self.swap(from, from.with_phase(to))
    }

    /// Opens the gate and wakes everybody who waits at it; afterwards the caller owes nothing.
    /// The holder's last step, and what revokes a holder.
    ///
    /// # Errors
    /// The word as it is, when it was no longer `from`.
    pub fn open(&self, from: GateWord) -> Result<(), GateWord> {
        let from = if hooks::sabotaged("epoch") { self.load() } else { from };
        self.swap(from, from.with_phase(Phase::Open))?;
        self.wake();
        Ok(())
    }

    /// Wakes whoever sleeps at the gate, so that it looks again.
    pub fn wake(&self) {
        sync::fence_between();
        // SeqCst: partner of the increment in `wait_while`. Either this load sees the sleeper, or
        // the sleeper's look at what it waits for sees what the caller changed before.
        if self.sleepers.load(Ordering::SeqCst) != 0 && !hooks::sabotaged("wake") {
            // SeqCst: who has read the bell before does not fall asleep any more, and who reads
            // the new count sees the caller's change.
            self.bell.fetch_add(1, Ordering::SeqCst);
            sync::wake_all(&self.bell);
        }
    }

    /// Sleeps until the word is no longer `seen`, but `timeout` at most.
    pub fn wait_change(&self, seen: GateWord, timeout: Duration) -> Wake {
        self.wait_while(seen, timeout, || true)
    }

    /// Sleeps until [`Gate::wake`] or [`Gate::open`] is called, but `timeout` at most, and only
    /// if the word is `seen` and `still` holds. Whatever else `still` depends on is changed before
    /// such a call.
    pub fn wait_while(
        &self,
        seen: GateWord,
        timeout: Duration,
        still: impl FnOnce() -> bool,
    ) -> Wake {
        let timeout = if hooks::sabotaged("wake") { Duration::from_secs(3600) } else { timeout };
        // SeqCst: partner of the load in `wake`.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        sync::fence_between();
        // Before the look at what is waited for: a wake-up from here on changes the bell.
        let rung = self.bell.load(Ordering::SeqCst);
        let wake = if self.load() == seen && still() {
            sync::wait(&self.bell, rung, timeout)
        } else {
            Wake::Changed
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        wake
    }

    /// SeqCst on success: the writing half of the handshakes (see `sync.rs`); it also releases
    /// what the caller wrote into the device's section before.
    fn swap(&self, from: GateWord, to: GateWord) -> Result<GateWord, GateWord> {
        let result = self.word.compare_exchange(from.0, to.0, Ordering::SeqCst, Ordering::SeqCst);
        sync::fence_between();
        result.map(|_| to).map_err(GateWord)
    }
}
