//! Switches for tests: disabling a step (sabotage) and stopping or dying at one (faults).
//!
//! They exist only in builds with the feature `test-hooks`; in every other build each function
//! is a constant that the compiler removes.
//!
//! * `KREX_SABOTAGE=name,name…` disables what is named; `make test-sabotage` shows that a test
//!   then fails.
//! * `KREX_FAULT=point=kill|stop,…` sends the signal to the calling process at the point.
//! * `KREX_FAULT=@PATH` does so once: what is to happen stands in the file, and whoever comes to
//!   the point first removes it.

#[cfg(all(feature = "test-hooks", not(loom)))]
mod enabled {
    use std::sync::OnceLock;

    /// Whether `switch` is named in `KREX_SABOTAGE`.
    pub fn sabotaged(switch: &str) -> bool {
        static SWITCHES: OnceLock<Vec<String>> = OnceLock::new();
        listed(SWITCHES.get_or_init(|| words("KREX_SABOTAGE")), switch)
    }

    fn words(variable: &str) -> Vec<String> {
        let value = std::env::var(variable).unwrap_or_default();
        value.split(',').filter(|word| !word.is_empty()).map(str::to_owned).collect()
    }

    fn listed(words: &[String], word: &str) -> bool {
        words.iter().any(|candidate| candidate == word)
    }

    /// Dies or stops here if `KREX_FAULT` says so.
    pub fn fault(point: &str) {
        static FAULTS: OnceLock<Vec<String>> = OnceLock::new();
        let faults = FAULTS.get_or_init(|| words("KREX_FAULT"));
        let once;
        let faults = match faults.first().and_then(|word| word.strip_prefix('@')) {
            Some(path) => {
                let wanted = std::fs::read_to_string(path).unwrap_or_default();
                let wanted = wanted.trim().to_owned();
                if !wanted.starts_with(&format!("{point}=")) || std::fs::remove_file(path).is_err()
                {
                    return;
                }
                once = vec![wanted];
                &once
            }
            None => faults,
        };
        let signal = if listed(faults, &format!("{point}=kill")) {
            rustix::process::Signal::KILL
        } else if listed(faults, &format!("{point}=stop")) {
            rustix::process::Signal::STOP
        } else {
            return;
        };
        let _ = rustix::process::kill_process(rustix::process::getpid(), signal);
    }
}
#[cfg(all(feature = "test-hooks", not(loom)))]
pub use enabled::{fault, sabotaged};

#[cfg(not(all(feature = "test-hooks", not(loom))))]
#[inline(always)]
pub const fn sabotaged(_switch: &str) -> bool {
    false
}

#[cfg(not(all(feature = "test-hooks", not(loom))))]
#[inline(always)]
pub fn fault(_point: &str) {}
