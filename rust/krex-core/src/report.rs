//! What is known about a region after its end: the report and its verdict.

use std::sync::atomic::Ordering;

use crate::clock;
use crate::freezer::Kind;
use crate::isolate;
use crate::region::{Own, Region};
use crate::reservation::Reservation;
use crate::siblings::{Outcome, Problem, Sibling};
use crate::tenant;

/// What krex can vouch for. The order is that of severity: of several, the last is the verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Nothing is known to have disturbed it.
    Clean,
    /// It could not be told.
    Unknown,
    /// The GPU had slowed its clocks down.
    Throttled,
    /// A process that krex does not know was on the GPU.
    Foreign,
    /// A tenant disturbed it.
    Contended,
    /// The region was taken away.
    Revoked,
}

impl Verdict {
    pub const ALL: [Self; 6] = [
        Self::Clean,
        Self::Unknown,
        Self::Throttled,
        Self::Foreign,
        Self::Contended,
        Self::Revoked,
    ];

    /// The verdict with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Clean => "clean",
            Self::Unknown => "unknown",
            Self::Throttled => "throttled",
            Self::Foreign => "foreign",
            Self::Contended => "contended",
            Self::Revoked => "revoked",
        }
    }
}

/// What happened. Times are in nanoseconds.
#[derive(Clone, Debug)]
pub struct Report {
    pub device: String,
    pub epoch: u64,
    pub label: String,
    pub joined: bool,
    pub freezer: &'static str,
    pub wait: u64,
    pub drain: u64,
    pub freeze: u64,
    pub isolate: u64,
    /// The CPUs that are reserved for regions on the device, if any.
    pub cpus: Option<String>,
    /// How the holder was kept on them.
    pub isolation: &'static str,
    pub held: u64,
    pub restore: u64,
    pub time_excluded: u64,
    /// How long the GPU went on with the region's own work after its last line.
    pub pending_at_exit: u64,
    /// What its own processes submitted to the device, through the interposer.
    pub submissions: u64,
    /// On how many streams.
    pub streams: u64,
    pub siblings: Vec<Outcome>,
    pub verdict: Verdict,
    pub reasons: Vec<String>,
}

impl Report {
    /// Adds what was found out elsewhere. The worst verdict stands, with all reasons.
    pub fn add(&mut self, verdict: Verdict, reason: String) {
        self.verdict = self.verdict.max(verdict);
        self.reasons.push(reason);
    }
}

impl Region {
    /// Judges the region; `present` are the siblings that there are now.
    pub(crate) fn report(
        &self,
        ended_at: u64,
        revoked: bool,
        verified: bool,
        present: &[Sibling],
        own: Own,
    ) -> Report {
        let segment = &self.client.segment;
        let tenure = self.word.tenure();
        // While the region runs nobody looks twice, so a joined one cannot be verified yet.
        let verified = verified || self.joined;
        let outcomes: Vec<Outcome> = self
            .siblings
            .iter()
            .map(|it| it.judge(segment, self.device, tenure, verified))
            .collect();
        let mut problems: Vec<Problem> =
            outcomes.iter().flat_map(|it| it.problems.clone()).collect();
        problems.extend(self.newcomers(present));
        if own.work.incomplete {
            problems.push(Problem {
                certain: false,
                text: "not all that the region submitted could be waited for at its end".to_owned(),
            });
        }
        if segment.devices[self.device].stalled_tenure.load(Ordering::Acquire) == tenure {
            let names: Vec<String> = self.siblings.iter().map(|it| it.name.clone()).collect();
            problems.insert(
                0,
                Problem {
                    certain: true,
                    text: format!(
                        "holder waited for {}, or was stopped: it ran on no CPU until siblings were thawed",
                        if names.len() == 1 {
                            names[0].clone()
                        } else {
                            format!("one of {}", names.join(", "))
                        }
                    ),
                },
            );
        }
        let disturbed = segment.devices[self.device].disturbed_tenure.load(Ordering::Acquire);
        if disturbed == tenure && problems.is_empty() {
            let text = "a sibling that has ended since was thawed during the region".to_owned();
            problems.push(Problem { certain: true, text });
        }
        problems.extend(self.isolation_problems());
        if !self.client.segment.is_current() {
            problems.push(Problem {
                certain: false,
                text:
                    "the segment was removed or replaced: others may not have known of the region"
                        .to_owned(),
            });
        }
        let mut reasons: Vec<String> = problems.iter().map(|it| it.text.clone()).collect();
        let judged = |it: &Problem| if it.certain { Verdict::Contended } else { Verdict::Unknown };
        let mut verdict = problems.iter().map(judged).max().unwrap_or(Verdict::Clean);
        if revoked {
            reasons.insert(0, self.revocation().to_string());
            verdict = Verdict::Revoked;
        }
        let tenant = self.client.tenant();
        let excluded = tenant.time_excluded(clock::now());
        let reported = self.client.excluded_reported.swap(excluded, Ordering::AcqRel);
        Report {
            device: self.device(),
            epoch: tenure,
            label: self.label.clone(),
            joined: self.joined,
            freezer: Kind::from_word(tenant.freezer.load(Ordering::Relaxed)).name(),
            wait: self.granted_at.saturating_sub(self.claimed_at),
            drain: self.drained_at.saturating_sub(self.granted_at),
            freeze: self.held_at.saturating_sub(self.drained_at).saturating_sub(self.isolating),
            isolate: self.isolating,
            cpus: self.reserved().map(|it| it.cpus.to_string()),
            isolation: if self.is_isolated() { "affinity" } else { "none" },
            held: ended_at.saturating_sub(self.held_at),
            restore: 0,
            time_excluded: excluded.saturating_sub(reported),
            pending_at_exit: own.pending,
            submissions: own.submissions,
            streams: own.work.streams,
            siblings: outcomes,
            verdict,
            reasons,
        }
    }

    /// The CPUs on which the region ran, or should have run, if any were reserved.
    fn reserved(&self) -> Option<Reservation> {
        match &self.isolated {
            Some(isolated) => Some(isolated.reservation),
            None if self.joined => isolate::current(&self.client.segment, self.word.holder()),
            None => None,
        }
    }

    fn is_isolated(&self) -> bool {
        self.isolated.as_ref().map_or(self.reserved().is_some(), |it| it.is_moved)
    }

    /// What could not be done about reserved CPUs.
    fn isolation_problems(&self) -> Vec<Problem> {
        let Some(Reservation { cpus: reserved, off, .. }) = self.reserved() else {
            return Vec::new();
        };
        let segment = &self.client.segment;
        let mut problems = Vec::new();
        let mut add = |certain: bool, text: String| problems.push(Problem { certain, text });
        if let Some(isolated) = &self.isolated {
            if let Some(problem) = &isolated.problem {
                add(false, format!("not isolated: {problem}"));
            }
            if let Some(elsewhere) = isolated.moved_off() {
                let text = "at its end the calling thread was not on the reserved CPUs";
                add(false, format!("{text} ({reserved}) any more, but on {elsewhere}"));
            }
            if isolated.is_crowded() {
                let text = "a region on another device ran on the same reserved CPUs";
                add(true, format!("{text} ({reserved}) at the same time"));
            }
        }
        let holder = self.word.holder();
        for slot in segment.live_tenants.iter() {
            let tenant = &segment.tenants[slot];
            let stays = tenant.on_reserved.get().meets(&off)
                && slot != holder
                // Those that share the device are frozen, or named as not frozen.
                && !tenant.shares(self.device)
                && !tenant::descends_from(segment, slot, holder);
            if stays {
                let name = tenant.name.get();
                add(false, format!("{name} may use no other CPUs than reserved ones ({reserved})"));
            }
        }
        problems
    }

    /// Tenants that came while the region ran. `krex run` holds its command back until the
    /// region is over; a process that attaches itself ran before, and nobody knew of it.
    fn newcomers(&self, present: &[Sibling]) -> Vec<Problem> {
        let mut names: Vec<&str> = present
            .iter()
            .filter(|new| !self.siblings.iter().any(|old| old.reference == new.reference))
            .filter(|new| new.attached)
            .map(|new| new.name.as_str())
            .collect();
        let section = &self.client.segment.devices[self.device];
        // Acquire: partner of the Release in `note_newcomer`.
        let noted = section.newcomer_tenure.load(Ordering::Acquire) == self.word.tenure();
        if noted && names.is_empty() {
            names.push("another process");
        }
        let problem = |name: &str| Problem {
            certain: true,
            text: format!("{name} ran beside the region before it attached"),
        };
        names.into_iter().map(problem).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_order_of_verdicts() {
        for verdict in Verdict::ALL {
            assert_eq!(Verdict::named(verdict.name()), Some(verdict));
        }
        assert!(Verdict::ALL.is_sorted());
        assert!(Verdict::Contended > Verdict::Foreign && Verdict::Unknown < Verdict::Throttled);
    }
}
