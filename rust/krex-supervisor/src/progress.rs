//! Whether a holder makes progress: the stall breaker's eyes.
//!
//! Frozen siblings can hold what the holder needs: a file lock, a pipe, a compile cache's server.
//! Then the holder runs on no CPU for as long as they are frozen.

use krex_core::clock::MILLISECOND;
use krex_core::word::GateWord;

/// A holder that ran on no CPU for this long is stalled.
pub const STALL_LIMIT: u64 = 250 * MILLISECOND;
/// How often one looks.
pub const SAMPLE_INTERVAL: u64 = 50 * MILLISECOND;
/// Less than this between two looks is no progress: polling a lock takes a little, too.
const LEAST: u64 = MILLISECOND / 2;

/// The last look at one device's holder.
#[derive(Clone, Copy, Debug)]
pub struct Watched {
    word: GateWord,
    cpu_time: u64,
    pub sampled_at: u64,
    /// When it last was seen to have run.
    progress_at: u64,
}

impl Watched {
    /// Begins to watch the tenure of `word`.
    pub fn begin(word: GateWord, cpu_time: u64, now: u64) -> Self {
        Self { word, cpu_time, sampled_at: now, progress_at: now }
    }

    pub fn is_about(&self, word: GateWord) -> bool {
        self.word == word
    }

    /// Takes another look; returns for how long the holder has not run.
    pub fn look(&mut self, cpu_time: u64, now: u64) -> u64 {
        // Less than before: somebody ended, and what it used went with it. That is progress.
        if cpu_time < self.cpu_time || cpu_time - self.cpu_time >= LEAST {
            self.progress_at = now;
        }
        self.cpu_time = cpu_time;
        self.sampled_at = now;
        now - self.progress_at
    }

    /// Gives the holder another [`STALL_LIMIT`]: something was done for it.
    pub fn restart(&mut self, now: u64) {
        self.progress_at = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use krex_core::word::Phase;

    #[test]
    fn a_holder_that_does_not_run_is_noticed_and_one_that_does_is_not() {
        let word = GateWord::new(1, 0, Phase::Held);
        let mut idle = Watched::begin(word, 100, 0);
        assert_eq!(idle.look(100, STALL_LIMIT), STALL_LIMIT);
        assert_eq!(idle.look(100 + LEAST, 2 * STALL_LIMIT), 0);
        assert_eq!(idle.look(5, 3 * STALL_LIMIT), 0, "a child ended");
        assert_eq!(
            idle.look(5 + LEAST - 1, 4 * STALL_LIMIT),
            STALL_LIMIT,
            "polling is no progress"
        );
        idle.restart(4 * STALL_LIMIT);
        assert_eq!(idle.look(5 + LEAST - 1, 4 * STALL_LIMIT + 7), 7);
    }
}
