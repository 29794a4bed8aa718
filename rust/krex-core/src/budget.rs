//! The budget on closed time: work outside of regions must get on, too.
//!
//! A *run* is the time in which the gate was closed, in one go or with short openings between: one
//! shorter than a quarter of the run so far does not end it. Once a run has lasted as long as
//! `KREX_MAX_CLOSED`, its holder opens the gate instead of handing over, and nobody takes it again
//! before a quarter of the run has passed.

use std::sync::OnceLock;
use std::time::Duration;

use crate::clock;
use crate::error::{Error, Result};
use crate::hooks;
use crate::sync::{AtomicU64, Ordering};

/// Longest run, if `KREX_MAX_CLOSED` says nothing else.
const MAX_CLOSED: Duration = Duration::from_secs(2);

/// No run counts for longer, whoever died between taking the gate and noting it.
const LONGEST: u64 = 60 * clock::SECOND;

/// `KREX_MAX_CLOSED`, in nanoseconds.
///
/// # Errors
/// If it is not a positive number of seconds.
pub fn max_closed() -> Result<u64> {
    static LIMIT: OnceLock<std::result::Result<u64, String>> = OnceLock::new();
    let read = || {
        let Some(value) = std::env::var_os("KREX_MAX_CLOSED").filter(|it| !it.is_empty()) else {
            return Ok(clock::nanoseconds(MAX_CLOSED));
        };
        let seconds = value.to_str().and_then(|it| it.parse::<f64>().ok()).unwrap_or(f64::NAN);
        match Duration::try_from_secs_f64(seconds) {
            Ok(limit) if !limit.is_zero() => Ok(clock::nanoseconds(limit)),
            _ => Err(format!("KREX_MAX_CLOSED is {value:?}; use a positive number of seconds")),
        }
    };
    LIMIT.get_or_init(read).clone().map_err(Error::Invalid)
}

/// A device's run, as it is noted by whoever closes or opens the gate.
///
/// Relaxed throughout: their swaps of the gate publish it. Nothing but a time depends on it.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Run {
    began_at: AtomicU64,
    /// When the gate was last opened. Before `began_at`: it was not since.
    opened_at: AtomicU64,
}

impl Run {
    /// The gate was taken while it was open: that goes on with the run, or begins another.
    pub fn closed(&self, now: u64) {
        let opened = self.opened_at.load(Ordering::Relaxed);
        if now.saturating_sub(opened) >= self.length() / 4 {
            self.began_at.store(now, Ordering::Relaxed);
        }
    }

    /// The gate is about to be opened.
    pub fn opening(&self, now: u64) {
        self.opened_at.store(now, Ordering::Relaxed);
    }

    /// The same, where there is nobody to whom the time is owed.
    pub fn end(&self, now: u64) {
        self.began_at.store(now, Ordering::Relaxed);
        self.opening(now);
    }

    /// Whether the run has lasted too long for another hand-over.
    pub fn is_spent(&self, now: u64, limit: u64) -> bool {
        let began = self.began_at.load(Ordering::Relaxed);
        now.saturating_sub(began) >= limit && !hooks::sabotaged("budget")
    }

    /// Until when an open gate has to stay open.
    pub fn open_until(&self, limit: u64) -> u64 {
        let length = self.length();
        if length < limit || hooks::sabotaged("budget") {
            return 0;
        }
        self.opened_at.load(Ordering::Relaxed).saturating_add(length.min(LONGEST) / 4)
    }

    /// How long the run lasted, if the gate was opened since.
    fn length(&self) -> u64 {
        let opened = self.opened_at.load(Ordering::Relaxed);
        opened.saturating_sub(self.began_at.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 1000;

    #[test]
    fn a_run_goes_on_over_short_openings_and_then_leaves_the_gate_open_for_a_quarter() {
        let run = Run::default();
        run.closed(10_000);
        assert!(!run.is_spent(10_999, LIMIT));
        run.opening(10_400);
        assert_eq!(run.open_until(LIMIT), 0, "nothing is owed yet");
        run.closed(10_450); // Open for 50, which is less than a quarter of 400.
        assert!(run.is_spent(11_000, LIMIT), "it counts from the first closing");
        run.opening(11_200);
        assert_eq!(run.open_until(LIMIT), 11_200 + 300);
        run.closed(11_500);
        assert!(!run.is_spent(12_400, LIMIT), "another run");
    }

    #[test]
    fn who_is_alone_owes_nothing() {
        let run = Run::default();
        run.closed(10_000);
        run.end(20_000);
        assert_eq!(run.open_until(LIMIT), 0);
        run.closed(20_001);
        assert!(!run.is_spent(21_000, LIMIT));
    }

    #[test]
    fn one_that_was_opened_long_enough_ends() {
        let run = Run::default();
        run.closed(10_000);
        run.opening(10_400);
        run.closed(10_500);
        assert!(!run.is_spent(11_400, LIMIT));
        assert!(run.is_spent(11_500, LIMIT));
    }
}
