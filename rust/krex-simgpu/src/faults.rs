//! Failures that a test asks for.
//!
//! Directives, separated by `;` or lines, from `KREX_SIMGPU_FAULTS` and, read again at each call,
//! the file `KREX_SIMGPU_FAULTS_FILE`:
//!
//! | directive | what happens |
//! | --- | --- |
//! | `memory` | allocations fail: out of memory |
//! | `sticky=700` | every call returns this |
//! | `hang` | kernels never end |
//! | `lost` | the device is gone: every call fails with 999, the waiting ones too |
//! | `fail:cuLaunchKernel=2` | calls of this entry return this |
//! | `lock=hang`, `lock=refuse` | `cuCheckpointProcessLock` never returns; or returns 801 |

use std::path::PathBuf;

use crate::status::{Status, UNKNOWN};

#[derive(Debug, Default)]
pub struct Faults {
    pub memory: bool,
    pub hang: bool,
    pub lock_hangs: bool,
    pub lock_refused: bool,
    /// What this entry returns without doing anything.
    pub status: Option<Status>,
}

#[derive(Debug)]
pub struct FaultSource {
    pub text: String,
    pub file: Option<PathBuf>,
}

impl FaultSource {
    /// What applies to a call of `entry` now.
    pub fn read(&self, entry: &str) -> Faults {
        let mut faults = Faults::default();
        faults.add(&self.text, entry);
        if let Some(text) = self.file.as_ref().and_then(|it| std::fs::read_to_string(it).ok()) {
            faults.add(&text, entry);
        }
        faults
    }
}

impl Faults {
    fn add(&mut self, text: &str, entry: &str) {
        for directive in text.split([';', '\n']).map(str::trim) {
            let (what, value) = directive.split_once('=').unwrap_or((directive, ""));
            match what {
                "memory" => self.memory = true,
                "hang" => self.hang = true,
                "lost" => self.status = Some(UNKNOWN),
                "sticky" => self.status = Some(value.parse().unwrap_or(UNKNOWN)),
                "lock" => {
                    self.lock_hangs |= value == "hang";
                    self.lock_refused |= value == "refuse";
                }
                _ => {
                    if what.strip_prefix("fail:").is_some_and(|it| it == entry) {
                        self.status = Some(value.parse().unwrap_or(UNKNOWN));
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives_apply_to_the_entry_they_name() {
        let text = "memory; fail:cuLaunchKernel=719\nlock=refuse".to_owned();
        let source = FaultSource { text, file: None };
        assert_eq!(source.read("cuLaunchKernel").status, Some(719));
        let faults = source.read("cuMemAlloc");
        assert!(faults.memory && faults.lock_refused && faults.status.is_none());
    }
}
