//! What the core asks of the interpreter: where the native program is, and whether a signal
//! handler raised something.

use std::cell::RefCell;
use std::path::PathBuf;

use krex_core::client::Host;
use krex_core::error::{Error, Result};
use pyo3::prelude::*;

use crate::convert;

/// The interpreter as host. It keeps what a signal handler raised, for the caller to re-raise.
#[derive(Default)]
pub struct Interpreter {
    raised: RefCell<Option<PyErr>>,
}

impl Host for Interpreter {
    fn program(&self) -> Result<PathBuf> {
        Python::attach(|py| {
            let path = py.import("krex._native")?.call_method0("native_program")?;
            path.str()?.extract::<PathBuf>()
        })
        .map_err(|error| Error::Supervisor(error.to_string()))
    }

    fn interrupted(&self) -> bool {
        Python::attach(|py| match py.check_signals() {
            Ok(()) => false,
            Err(error) => {
                *self.raised.borrow_mut() = Some(error);
                true
            }
        })
    }
}

impl Interpreter {
    /// The Python exception for an error of the core.
    pub fn explain(self, py: Python<'_>, error: Error) -> PyErr {
        match (self.raised.into_inner(), error) {
            (Some(raised), Error::Interrupted) => raised,
            (_, error) => convert::error(py, error),
        }
    }
}

/// Waits without the interpreter, then converts the error.
pub fn without_interpreter<T: Send>(
    py: Python<'_>,
    work: impl FnOnce(&Interpreter) -> Result<T> + Send,
) -> PyResult<T> {
    let (host, result) = py.detach(|| {
        let host = Interpreter::default();
        let result = work(&host);
        (host, result)
    });
    result.map_err(|error| host.explain(py, error))
}

/// Log messages go to standard error, if `KREX_LOG` asks for any.
pub fn start_log() {
    use std::io::Write;
    let (level, problem) = krex_core::logging::level();
    let mut builder = env_logger::Builder::new();
    builder.filter_level(level);
    builder.format(|buffer, record| writeln!(buffer, "{}", krex_core::logging::line(record)));
    // It fails only if a log was started before.
    if let (Ok(()), Some(problem)) = (builder.try_init(), problem) {
        log::warn!("{problem}");
    }
}
