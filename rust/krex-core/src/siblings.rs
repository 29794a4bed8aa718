//! The other tenants on a device, as the holder sees them.

use std::collections::HashMap;

use crate::device;
use crate::drain::coverage;
use crate::layout::Layout;
use crate::tenant;
use crate::word::{Ack, Drained, Frozen, Obstacle, Reference, SlotState, Stage};

/// A sibling of the holder: to be turned back, drained and frozen.
#[derive(Clone, Debug)]
pub struct Sibling {
    pub reference: Reference,
    pub name: String,
    pub supervisor: usize,
    pub attached: bool,
    /// What its supervisor had done when the region began: the slot may be used again by its end.
    settled: Option<Ack>,
    /// Completed submissions per submitter slot, when the region began.
    completed: HashMap<usize, u64>,
}

/// What is known about a sibling after the region.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub name: String,
    pub drained: Drained,
    pub frozen: Frozen,
    /// Submissions of it that were completed, or begun, while the region ran.
    pub submissions: u64,
    pub in_flight: u64,
    /// Its interposer met a function that it doesn't know.
    pub incomplete: bool,
    /// It uses a GPU, for all that is known, and no interposer tells what it does there.
    pub unseen: bool,
    pub problems: Vec<Problem>,
}

/// A reason why a sibling may have disturbed the region.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Known to have disturbed, as opposed to not known.
    pub certain: bool,
    pub text: String,
}

/// Lists the siblings of the tenant in slot `holder` on `device`: everybody who shares it,
/// except the holder's own descendants.
pub fn list(segment: &Layout, device: usize, holder: usize) -> Vec<Sibling> {
    segment
        .live_tenants
        .iter()
        .filter_map(|slot| {
            let tenant = &segment.tenants[slot];
            let owner = tenant.owner();
            // One that is still starting looks at the gate before it runs anything, unless it
            // splits off from another, which counted in its place.
            let is_there = match owner.state() {
                SlotState::Live => true,
                SlotState::Starting => tenant.parent().is_some(),
                SlotState::Free | SlotState::Ending => false,
            };
            let counts = is_there
                && slot != holder
                && tenant.shares(device)
                && !tenant::descends_from(segment, slot, holder);
            counts.then(|| Sibling {
                reference: Reference { slot, generation: owner.generation() },
                name: tenant.name.get(),
                supervisor: owner.supervisor(),
                attached: tenant.attached.load(std::sync::atomic::Ordering::Relaxed) != 0,
                settled: None,
                completed: HashMap::new(),
            })
        })
        .collect()
}

/// The distinct supervisors of `siblings`.
pub fn supervisors<'a>(siblings: impl IntoIterator<Item = &'a Sibling>) -> Vec<usize> {
    let mut slots: Vec<usize> = siblings.into_iter().map(|it| it.supervisor).collect();
    slots.sort_unstable();
    slots.dedup();
    slots
}

impl Sibling {
    /// Whether the tenant has ended.
    fn has_ended(&self, segment: &Layout) -> bool {
        tenant::resolve(segment, self.reference).is_none()
    }

    /// What its supervisor did for `tenure`. What it said of one that has ended since still
    /// counts.
    fn ack(&self, segment: &Layout, device: usize, tenure: u64) -> Ack {
        let tenant = &segment.tenants[self.reference.slot];
        let ack = tenant.ack(device);
        let is_same = tenant.owner().generation() == self.reference.generation;
        let settled = self.settled.filter(|it| it.tenure == tenure);
        match is_same && ack.tenure == tenure {
            true => ack,
            false => settled.unwrap_or(Ack::none(tenure)),
        }
    }

    /// Whether its supervisor has come as far as `stage` for `tenure`, or it has ended.
    pub fn has_reached(&self, segment: &Layout, device: usize, tenure: u64, stage: Stage) -> bool {
        self.ack(segment, device, tenure).stage >= stage || self.has_ended(segment)
    }

    /// Whether it was frozen for `tenure`.
    pub fn is_frozen(&self, segment: &Layout, device: usize, tenure: u64) -> bool {
        let ack = self.ack(segment, device, tenure);
        ack.stage >= Stage::Settled && ack.frozen != Frozen::No
    }

    fn submitters<'a>(
        &'a self,
        segment: &'a Layout,
        device: usize,
    ) -> impl Iterator<Item = usize> + 'a {
        segment.live_submitters.iter().filter(move |slot| {
            let submitter = &segment.submitters[*slot];
            submitter.tenant() == Some(self.reference)
                && submitter.device.load(std::sync::atomic::Ordering::Relaxed) == device as u64
        })
    }

    /// Notes what it has completed so far: the region begins.
    pub fn begin(&mut self, segment: &Layout, device: usize, tenure: u64) {
        self.settled = Some(self.ack(segment, device, tenure));
        let slots: Vec<usize> = self.submitters(segment, device).collect();
        for slot in slots {
            self.completed.insert(slot, segment.submitters[slot].progress());
        }
    }

    /// Judges what it did in the region.
    pub fn judge(&self, segment: &Layout, device: usize, tenure: u64, verified: bool) -> Outcome {
        let mut submissions = 0;
        let mut in_flight = 0;
        let mut incomplete = false;
        for slot in self.submitters(segment, device) {
            let submitter = &segment.submitters[slot];
            let before = self.completed.get(&slot).copied().unwrap_or(0);
            submissions += submitter.progress().saturating_sub(before);
            in_flight += submitter.in_flight();
            incomplete |= submitter.covers(coverage::INCOMPLETE);
        }
        let ack = self.ack(segment, device, tenure);
        let ended = self.has_ended(segment);
        let mut outcome = Outcome {
            name: self.name.clone(),
            drained: ack.drained,
            frozen: if ack.stage == Stage::None && ended { Frozen::Gone } else { ack.frozen },
            submissions,
            in_flight,
            incomplete,
            unseen: self.unseen(segment, device),
            problems: Vec::new(),
        };
        outcome.problems = self.problems(&outcome, ack, verified || ended);
        outcome
    }

    fn unseen(&self, segment: &Layout, device: usize) -> bool {
        let tenant = &segment.tenants[self.reference.slot];
        device::is_gpu(&segment.devices[device].name.get())
            // Relaxed: what it says became so before the tenant submitted anything.
            && tenant.preloaded.load(std::sync::atomic::Ordering::Relaxed) == 0
    }

    fn problems(&self, outcome: &Outcome, ack: Ack, verified: bool) -> Vec<Problem> {
        let name = &self.name;
        let mut problems = Vec::new();
        let mut add = |certain: bool, text: String| problems.push(Problem { certain, text });
        if outcome.submissions > 0 {
            add(true, format!("{name} submitted {} times in the region", outcome.submissions));
        }
        if outcome.incomplete {
            let text = "uses functions of the driver that this krex does not know, so that not all \
                        that it submits is gated";
            add(true, format!("{name} {text}"));
        }
        if outcome.frozen == Frozen::Gone {
            return problems;
        }
        if outcome.unseen {
            let text = "was started without krex's interposer, so that nobody knows whether work \
                        of it was running";
            add(false, format!("{name} {text}"));
        }
        if ack.stage == Stage::None {
            add(true, format!("{name} was not frozen: its supervisor did not answer in time"));
            return problems;
        }
        if ack.drained == Drained::TimedOut {
            let what = match outcome.in_flight {
                0 => "work of it was still running".to_owned(),
                count => format!("{count} in flight"),
            };
            add(true, format!("{name} was not drained: {what} after drain_timeout"));
        }
        if ack.frozen == Frozen::No {
            let why = match ack.obstacle {
                Obstacle::None => "it was thawed or never froze",
                Obstacle::FreezeFailed => "its freezer failed",
                Obstacle::FreezeTimedOut => "a task of it did not freeze in time",
                Obstacle::IsInit => "it is PID 1, which cannot be stopped from inside",
                Obstacle::NotPermitted => "some of its processes belong to another user",
            };
            add(true, format!("{name} was not frozen: {why}"));
        }
        if ack.disturbed {
            add(
                true,
                format!(
                    "{name} ran during the region: it was thawed or continued by somebody, or its \
                     supervisor was replaced"
                ),
            );
        } else if !verified && ack.stage < Stage::Verified && ack.frozen != Frozen::No {
            add(false, format!("{name} could not be looked at again after the region"));
        }
        problems
    }
}
