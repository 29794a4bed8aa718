//! What can go wrong, with the remedy in the message.

use std::io;
use std::path::{Path, PathBuf};

/// Errors of krex's core.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The runtime directory or the segment cannot be used.
    #[error("{}: {problem}. {remedy}", .path.display())]
    Segment { path: PathBuf, problem: String, remedy: String },

    /// An argument is out of its range.
    #[error("{0}")]
    Invalid(String),

    #[error(
        "unknown device {0:?}. Use `cpu`, or `cpu:NAME` (1 to 59 of a-z A-Z 0-9 . _ -) for a group of commands of its own, or a GPU's UUID as `nvidia-smi -L` prints it, with its prefix `GPU-` or `MIG-`"
    )]
    UnknownDevice(String),

    /// A fixed table of the segment is full.
    #[error("all {capacity} {what} slots are in use. End some, or run `krex recover`")]
    Full { what: &'static str, capacity: usize },

    #[error("no region on {device} within {waited_s:.3} s: {state}")]
    Timeout { device: String, waited_s: f64, state: String },

    #[error("the region on {device} (epoch {epoch}) was revoked: {cause}. Its measurement is void")]
    Revoked { device: String, epoch: u64, cause: String },

    #[error("{0}")]
    Misuse(String),

    #[error("the supervisor did not start: {0}")]
    Supervisor(String),

    /// A signal handler of the caller asked to stop waiting.
    #[error("interrupted")]
    Interrupted,

    #[error("{context}: {source}")]
    System { context: String, source: io::Error },
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn segment(path: &Path, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::Segment { path: path.into(), problem: problem.into(), remedy: remedy.into() }
    }

    pub fn system(context: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::System { context: context.into(), source: source.into() }
    }
}
