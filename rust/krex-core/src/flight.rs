//! Counting submissions in flight, and turning them back.
//!
//! # Why no submission slips through
//!
//! A submission (a) raises its count, (b) reads the gate. A holder (c) closes the gate, (d) reads
//! the counts. All four are SeqCst (see `sync.rs`). If (a) comes before (c) in their total order,
//! then (d) sees the raised count and waits for it. If (c) comes before (a), then (b) sees the
//! closed gate and the submission turns back before it reached the driver. There is no third case.

use crate::gate::Gate;
use crate::sync::{self, AtomicU64, Ordering};
use crate::word::GateWord;

/// Low bits: in flight now. High bits: admitted since the start, including those in flight.
const IN_FLIGHT_BITS: u32 = 24;
const IN_FLIGHT: u64 = (1 << IN_FLIGHT_BITS) - 1;
const ADMITTED: u64 = 1 << IN_FLIGHT_BITS;

/// What one submitter has in flight on one device. All zero is an idle one.
///
/// One word holds both counts, so that an admitted submission costs two atomic operations in
/// all: one to enter, one to leave.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Flight {
    counts: AtomicU64,
}

/// The two counts of a [`Flight`], read at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Submissions between enter and leave, including those that are about to be turned back.
    pub in_flight: u64,
    /// Submissions that were admitted and have left.
    pub completed: u64,
}

impl Flight {
    /// Starts from nothing: the slot has a new owner.
    pub fn reset(&self) {
        // Relaxed: published by the swap that makes the slot live.
        self.counts.store(0, Ordering::Relaxed);
    }

    /// Enters if `gate` is open, or closed on behalf of somebody whom `may_pass` accepts.
    ///
    /// # Errors
    /// The gate's word, when the submission was turned back; nothing is counted then.
    #[inline]
    pub fn try_enter(
        &self,
        gate: &Gate,
        may_pass: impl FnOnce(GateWord) -> bool,
    ) -> Result<(), Refused> {
        // SeqCst: (a) of the module's argument.
        self.counts.fetch_add(ADMITTED + 1, Ordering::SeqCst);
        sync::fence_between();
        // (b) of the module's argument.
        let word = gate.load();
        if word.is_open() || may_pass(word) || crate::hooks::sabotaged("turn_back") {
            return Ok(());
        }
        let before = self.counts.fetch_sub(ADMITTED + 1, Ordering::SeqCst);
        Err(Refused { word, was_last: before & IN_FLIGHT == 1 })
    }

    /// Enters if `gate` is open; for callers whose slow path starts afresh.
    #[inline]
    pub fn try_enter_quickly(&self, gate: &Gate) -> bool {
        // A look first: a short-lived count at a closed gate would make a drain look twice.
        gate.load().is_open() && self.try_enter(gate, |_| false).is_ok()
    }

    /// Leaves. Returns whether a drain may be waiting for exactly this: nothing is in flight any
    /// more, and the gate is closed.
    #[inline]
    pub fn leave(&self, gate: &Gate) -> bool {
        // SeqCst, Release included: whoever reads zero sees all that the submission did. Partner
        // of the supervisor's look at the counts: it either reads the lower count, or has closed
        // the gate before, so that the load below sees it closed and the caller rings.
        let before = self.counts.fetch_sub(1, Ordering::SeqCst);
        sync::fence_between();
        before & IN_FLIGHT == 1 && !gate.load().is_open()
    }

    /// The counts now.
    #[inline]
    pub fn counts(&self) -> Counts {
        // SeqCst: (d) of the module's argument.
        let counts = self.counts.load(Ordering::SeqCst);
        let in_flight = if crate::hooks::sabotaged("count") { 0 } else { counts & IN_FLIGHT };
        Counts { in_flight, completed: (counts >> IN_FLIGHT_BITS).wrapping_sub(in_flight) }
    }
}

/// A submission that was turned back.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// The gate as it was seen.
    pub word: GateWord,
    /// Its short-lived count was the last one, so that a drain may wait for its going.
    pub was_last: bool,
}
