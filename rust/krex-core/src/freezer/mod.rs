//! Freezing a tenant as one unit. Only supervisors do it.

mod cgroup2;
pub mod emergency;
mod sigstop;

use std::io;

pub use cgroup2::Cgroup2;
pub use sigstop::{Journal, Members, Sigstop, continue_all};

use crate::process::Processes;

/// How tenants are frozen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Not frozen at all: gate and drain only.
    None = 0,
    /// `cgroup.freeze`.
    Cgroup2 = 1,
    /// SIGSTOP to every process of the tree.
    Sigstop = 2,
}

impl Kind {
    pub fn from_word(word: u64) -> Self {
        match word {
            1 => Self::Cgroup2,
            2 => Self::Sigstop,
            _ => Self::None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cgroup2 => "cgroup2",
            Self::Sigstop => "sigstop",
        }
    }
}

/// What `KREX_FREEZER` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// cgroup v2 where the caller may make groups, else SIGSTOP.
    Auto,
    Only(Kind),
}

impl Choice {
    /// # Errors
    /// If `KREX_FREEZER` has another value.
    pub fn from_environment() -> crate::error::Result<Self> {
        let value = std::env::var_os("KREX_FREEZER").unwrap_or_default();
        match value.to_str() {
            Some("" | "auto") => Ok(Self::Auto),
            Some("cgroup2") => Ok(Self::Only(Kind::Cgroup2)),
            Some("sigstop") => Ok(Self::Only(Kind::Sigstop)),
            _ => Err(crate::error::Error::Invalid(format!(
                "KREX_FREEZER is {value:?}; use auto, cgroup2 or sigstop"
            ))),
        }
    }
}

/// All processes, read once and shared by everyone who freezes in the same round.
#[derive(Default)]
pub struct ProcessTable(Option<Processes>);

impl ProcessTable {
    pub fn get(&mut self) -> &Processes {
        self.0.get_or_insert_with(Processes::read)
    }
}

/// A way to freeze one tenant. `start` and `thaw` may be called in any state, any number of
/// times; after `thaw` returns, nothing that `start` did is left, even if `start` failed halfway.
pub trait Freezer {
    /// Begins to freeze.
    ///
    /// # Errors
    /// If it cannot; `thaw` undoes what was done by then.
    fn start(&mut self, processes: &mut ProcessTable) -> io::Result<()>;

    /// Whether every task of the tenant is frozen now, also those born since `start`; carries on
    /// with those that are not. `processes` must have been read after the last call.
    ///
    /// # Errors
    /// As `start`.
    fn is_frozen(&mut self, processes: &mut ProcessTable) -> io::Result<bool>;

    /// Whether a tenant that was frozen still is; changes nothing.
    ///
    /// # Errors
    /// If the kernel does not tell.
    fn is_still_frozen(&mut self, processes: &mut ProcessTable) -> io::Result<bool>;

    /// Lets everything run again that `start` froze.
    ///
    /// # Errors
    /// If the kernel refuses; the caller tries again.
    fn thaw(&mut self) -> io::Result<()>;
}
