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
#[derive(Debug)]
pub struct Gate {
    word: AtomicU64,
    /// How many threads sleep on `word`, so that opening a gate at which nobody waits costs no
    /// system call. A sleeper that is killed leaves its count behind: later openings then make
    /// a wake-up call that finds nobody, and nothing else.
    sleepers: AtomicU64,
}

impl Gate {
    #[cfg(loom)]
    #[allow(clippy::new_without_default)]
    pub fn new() -> Self {
        Self { word: AtomicU64::new(0), sleepers: AtomicU64::new(0) }
    }

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
        // SeqCst: partner of the increment in `wait_change`. Either this load sees the sleeper,
        // or the sleeper's compare (in the kernel) sees the word that was swapped before.
        if self.sleepers.load(Ordering::SeqCst) != 0 && !hooks::sabotaged("wake") {
            sync::wake_all(&self.word);
        }
    }

    /// Sleeps until the word is no longer `seen`, but `timeout` at most.
    pub fn wait_change(&self, seen: GateWord, timeout: Duration) -> Wake {
        let timeout = if hooks::sabotaged("wake") { Duration::from_secs(3600) } else { timeout };
        // SeqCst: partner of the load in `wake`.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        sync::fence_between();
        let wake = sync::wait(&self.word, seen.0, timeout);
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
