//! The supervisor's part in reserved CPUs: keeping tenants off, and putting holders' masks right.

use std::sync::atomic::Ordering;
use std::time::Duration;

use krex_core::affinity::{self, CpuSet};
use krex_core::clock::{self, MILLISECOND};
use krex_core::freezer::ProcessTable;
use krex_core::isolate;
use krex_core::keep_off;
use krex_core::members::Member;
use krex_core::reservation;
use krex_core::word::Isolation;

/// For how long one looks for what was being born when masks were restored. Busy processes may
/// take long to bear it.
const SETTLING: u64 = 500 * MILLISECOND;
const LOOK_AGAIN: u64 = 20 * MILLISECOND;
/// For how long one keeps others off before one looks at the gates again.
const AT_A_TIME: u64 = 2 * MILLISECOND;

use crate::charge::Progress;
use crate::worker::Worker;

impl Worker<'_> {
    /// Restores the masks of holders whose tenure has ended without their doing so.
    pub(crate) fn restore_masks(&mut self) {
        for (slot, charge) in &self.charges {
            if self.segment.tenants[*slot].isolation().is_in_hand() {
                isolate::restore_if_over(self.segment, *slot, &charge.seen());
            }
        }
    }

    /// Looks for what was being born when masks were restored. Nobody waits for it, so it comes
    /// after everything else.
    pub(crate) fn settle_masks(&mut self) {
        let now = clock::now();
        let mut next = u64::MAX;
        for (slot, charge) in &mut self.charges {
            let word = self.segment.tenants[*slot].isolation();
            if word.stage() != Isolation::Settling {
                continue;
            }
            if charge.settling.0 != word {
                charge.settling = (word, now, now + LOOK_AGAIN);
            }
            let (_, since, due) = &mut charge.settling;
            if now >= *due {
                *due = now + LOOK_AGAIN;
                let last = now >= *since + SETTLING;
                isolate::settle(self.segment, *slot, word, &charge.seen(), last);
            }
            next = next.min(charge.settling.2);
        }
        self.wake_at(next);
    }

    fn is_settling(&self, slot: usize) -> bool {
        self.segment.tenants[slot].isolation().stage() == Isolation::Settling
    }

    /// Keeps tenants off reserved CPUs that are new, or for which some are; and itself, too. Not
    /// all at once: nobody who rings waits for longer than one of them takes.
    pub(crate) fn keep_off_reserved(&mut self, processes: &mut ProcessTable) {
        let fingerprint = reservation::fingerprint(self.segment);
        if fingerprint != self.reserved.0 {
            self.reserved = (fingerprint, reservation::of_all(self.segment));
            let own = std::process::id() as i32;
            for thread in Member::of(own).threads {
                // It fails only if all CPUs are reserved.
                let _ = affinity::set(thread, &CpuSet::ALL.without(&self.reserved.1));
            }
        }
        if self.reserved.1.is_empty() {
            return;
        }
        let doorbell = &self.segment.supervisors[self.slot].doorbell;
        let mut until = None;
        for (slot, charge) in &mut self.charges {
            // What is frozen gives itself no other mask, and the holder is in a hurry.
            if charge.kept_off == fingerprint || charge.progress != Progress::Running {
                continue;
            }
            let rung = || doorbell.load(Ordering::SeqCst) != self.rung;
            if until.is_some_and(|until| rung() || clock::now() > until) {
                self.next = 0; // The gates first; the others come with the next round.
                return;
            }
            if keep_off::keep_off(self.segment, *slot, &self.reserved.1, processes) {
                charge.kept_off = fingerprint;
                until = until.or(Some(clock::now() + AT_A_TIME));
            }
        }
    }

    /// Nobody is kept off any CPU any more: krex is taken out of use.
    pub(crate) fn give_cpus_back(&mut self) {
        self.restore_masks();
        // What is being born appears while the others are still here to look for it.
        while self.charges.keys().any(|slot| self.is_settling(*slot)) {
            self.settle_masks();
            std::thread::sleep(Duration::from_nanos(LOOK_AGAIN));
        }
        let off = reservation::of_all(self.segment);
        let mut processes = ProcessTable::default();
        for slot in self.charges.keys() {
            keep_off::give_back(self.segment, *slot, &off, &mut processes);
        }
    }
}
