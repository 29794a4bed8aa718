//! Time: nanoseconds of `CLOCK_MONOTONIC`, the same number in every process of a machine.

use std::time::Duration;

pub const SECOND: u64 = 1_000_000_000;
pub const MILLISECOND: u64 = 1_000_000;

/// Now. The clock starts at boot and never jumps.
pub fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * SECOND + time.tv_nsec as u64
}

/// A duration as nanoseconds; what does not fit is for ever.
pub fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Nanoseconds as seconds, for reports.
pub fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / SECOND as f64
}

/// A moment by which a wait must end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(u64);

impl Deadline {
    pub const NEVER: Self = Self(u64::MAX);

    pub fn after(duration: Duration) -> Self {
        Self(now().saturating_add(nanoseconds(duration)))
    }

    pub fn at(nanoseconds: u64) -> Self {
        Self(nanoseconds)
    }

    /// As nanoseconds of the monotonic clock.
    pub fn time(self) -> u64 {
        self.0
    }

    pub fn has_passed(self) -> bool {
        self.0 != u64::MAX && now() >= self.0
    }

    /// What is left, but `at_most`.
    pub fn left(self, at_most: Duration) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(now())).min(at_most)
    }
}
