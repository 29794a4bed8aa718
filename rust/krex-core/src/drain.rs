//! Draining what a process has submitted: the words with which it is asked to, and answers.
//!
//! Only the process itself can wait for its streams. A thread of it, the *helper*, sleeps on the
//! slot's request word. Whoever wants it drained (the supervisor of a sibling; the holder, at its
//! region's end) stores the number of the tenure there and wakes it; the helper answers with the
//! same number. A process that has submitted nothing since its last drain is not asked at all.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::client::{Client, SLICE};
use crate::layout::{Layout, Submitter};
use crate::process;
use crate::supervision;
use crate::sync::{self, AtomicU64};
use crate::tenant;
use crate::word::{DrainAnswer, DrainOutcome, SlotState};

/// How long an answer is waited for before it is looked whether the process is still there.
const FIRST_WAIT: Duration = Duration::from_millis(2);

/// What the interposer says about itself, in [`Submitter::coverage`].
pub mod coverage {
    /// Its helper answers drain requests.
    pub const DRAINS: u64 = 1;
    /// It met a function that submits and that it doesn't know.
    pub const INCOMPLETE: u64 = 2;
}

/// The words of a drain, in a submitter's slot. All zero: nothing was asked for.
#[repr(C)]
#[derive(Debug, Default)]
pub struct DrainWords {
    /// The tenure for which the last drain was asked. The helper sleeps here.
    request: AtomicU64,
    /// Packed [`DrainAnswer`]. Who asked sleeps here, unless it has a doorbell.
    answer: AtomicU64,
    /// How many submissions were completed when the last drain began that left nothing behind.
    drained: AtomicU64,
}

impl DrainWords {
    /// The slot has a new owner.
    pub fn reset(&self) {
        // Relaxed: published by the swap that makes the slot live.
        for word in [&self.request, &self.answer, &self.drained] {
            word.store(0, Ordering::Relaxed);
        }
    }

    /// Whether something may have been left behind since the last drain.
    pub fn is_dirty(&self, completed: u64) -> bool {
        // Acquire: partner of the Release in `answer`.
        self.drained.load(Ordering::Acquire) != completed
    }

    /// Asks for a drain for `tenure`, unless that was done before.
    pub fn ask(&self, tenure: u64) {
        // AcqRel: the helper that reads the request comes after the caller's look at the counts.
        if self.request.swap(tenure, Ordering::AcqRel) != tenure {
            sync::wake_all(&self.request);
        }
    }

    /// The answer for `tenure`, if there is one.
    pub fn answer_for(&self, tenure: u64) -> Option<DrainAnswer> {
        DrainAnswer::unpack(self.answer.load(Ordering::Acquire)).filter(|it| it.tenure == tenure)
    }

    /// Whether a drain was asked for and is not answered.
    pub fn is_pending(&self) -> bool {
        let asked = self.request.load(Ordering::Acquire);
        asked != 0 && self.answer_for(asked).is_none()
    }

    /// For the helper: sleeps until a drain is asked for that is not `last`, for a while at most.
    /// Returns the last request.
    pub fn await_request(&self, last: u64, timeout: Duration) -> u64 {
        // Acquire: partner of the AcqRel in `ask`.
        let asked = self.request.load(Ordering::Acquire);
        if asked == last {
            sync::wait(&self.request, last, timeout);
        }
        self.request.load(Ordering::Acquire)
    }

    /// For the helper: answers. `completed` is what was completed when the drain began, if
    /// nothing of that is left.
    pub fn answer(&self, answer: DrainAnswer, completed: Option<u64>) {
        if let Some(completed) = completed {
            // Release: partner of the Acquire in `is_dirty`.
            self.drained.store(completed, Ordering::Release);
        }
        // Release: who sees the answer sees what was stored above.
        self.answer.store(answer.pack(), Ordering::Release);
        sync::wake_all(&self.answer);
    }

    fn wait_for_answer(&self, tenure: u64, timeout: Duration) {
        let seen = self.answer.load(Ordering::Acquire);
        if self.answer_for(tenure).is_none() {
            sync::wait(&self.answer, seen, timeout);
        }
    }
}

/// What the holder's own processes had submitted to the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnWork {
    /// Streams on which something was submitted.
    pub streams: u64,
    /// Some of it could not be waited for: a process without a helper, or a revoked region.
    pub incomplete: bool,
    /// A stream reported an error.
    pub failed: bool,
}

/// The submitter slots of `holder` and its descendants, on `device`.
pub fn family(segment: &Layout, device: usize, holder: usize) -> impl Iterator<Item = &Submitter> {
    segment.live_submitters.iter().map(|slot| &segment.submitters[slot]).filter(move |it| {
        let Some(tenant) = it.tenant() else { return false };
        it.owner().state() == SlotState::Live
            && it.device.load(Ordering::Relaxed) == device as u64
            && (tenant.slot == holder || tenant::descends_from(segment, tenant.slot, holder))
    })
}

/// Submissions that these have completed so far.
pub fn completed(segment: &Layout, device: usize, holder: usize) -> u64 {
    family(segment, device, holder).map(|it| it.flight().counts().completed).sum()
}

/// Waits until the GPU has done all that the holder's processes submitted, for as long as the
/// tenure lasts.
pub fn await_own(client: &Client, device: usize, tenure: u64) -> OwnWork {
    let segment = &client.segment;
    let holder = client.reference().slot;
    let asked: Vec<&Submitter> = family(segment, device, holder)
        .filter(|it| it.drain.is_dirty(it.flight().counts().completed))
        .filter(|it| it.covers(coverage::DRAINS))
        .collect();
    for submitter in &asked {
        submitter.drain.ask(tenure);
    }
    let mut work = OwnWork::default();
    for submitter in asked {
        let owner = submitter.owner();
        let start_time = submitter.start_time.load(Ordering::Acquire);
        let mut pause = FIRST_WAIT;
        loop {
            if let Some(answer) = submitter.drain.answer_for(tenure) {
                work.streams += answer.streams;
                work.failed |= answer.outcome == DrainOutcome::Error;
                work.incomplete |= answer.outcome == DrainOutcome::Incomplete;
                break;
            }
            let word = client.gate(device).load();
            if word.is_open() || word.tenure() != tenure || segment.is_retired() {
                work.incomplete = true;
                break;
            }
            if submitter.owner() != owner {
                break; // It has ended, and its work with it.
            }
            // Of another PID namespace nothing can be seen; the tenure's limit is left then.
            if pause == SLICE
                && owner.supervisor() == client.supervisor
                && !process::is_alive(owner.pid(), start_time)
            {
                break; // Likewise: its files are closed before it shows as ended.
            }
            submitter.drain.wait_for_answer(tenure, pause);
            pause = SLICE;
        }
    }
    work
}

/// Rings for the supervisor of the process that was drained.
pub fn ring_supervisor(client: &Client) {
    supervision::ring(&client.segment, client.supervisor);
}
