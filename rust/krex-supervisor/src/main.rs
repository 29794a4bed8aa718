//! The native program `krex`: launches commands (`krex run`) and is its own supervisor.
//!
//! `main` is C's, so that Rust's runtime does not touch the signal dispositions: the command
//! inherits exactly those of the caller. All other subcommands are Python's.

#![cfg_attr(not(test), no_main)]

mod charge;
mod cleaning;
mod cpus;
mod exits;
mod holder;
mod keeper;
mod launcher;
mod limits;
mod options;
mod preload;
mod settle;
mod worker;

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// Exit status for krex's own failures, as timeout(1) has it.
const FAILED: i32 = 125;
/// Exit status for a wrong command line.
const USAGE: i32 = 2;

/// Why the program ends without becoming the command.
pub struct Exit {
    pub status: i32,
    pub message: String,
}

impl Exit {
    pub fn usage(message: impl std::fmt::Display) -> Self {
        Self { status: USAGE, message: format!("{message} (see `krex run --help`)") }
    }

    pub fn failed(message: impl std::fmt::Display) -> Self {
        Self { status: FAILED, message: message.to_string() }
    }
}

/// C's `main`, so that Rust's runtime leaves the signal dispositions alone.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn main(_argc: libc::c_int, _argv: *const *const libc::c_char) -> libc::c_int {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let result = match arguments.first().and_then(|word| word.to_str()) {
        Some("run") => launcher::run(arguments[1..].to_vec()),
        Some("__supervise") => keeper::start(&arguments[1..]),
        Some("--version" | "-V") => {
            return print(&format!("krex {}\n", env!("CARGO_PKG_VERSION")));
        }
        _ => python(&arguments),
    };
    match result {
        Ok(()) => 0,
        Err(exit) => {
            // If even that cannot be written, the status has to do.
            let _ = writeln!(std::io::stderr(), "krex: {}", exit.message.replace('\n', " "));
            exit.status
        }
    }
}

/// Writes to standard output; the status says whether it could.
pub fn print(text: &str) -> i32 {
    let mut output = std::io::stdout();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        Ok(()) => 0,
        Err(_) => FAILED,
    }
}

/// Becomes the Python half, which pip installed beside this program.
fn python(arguments: &[OsString]) -> Result<(), Exit> {
    let program = own_path()?.with_file_name("krex-python");
    let error = Command::new(&program).args(arguments).exec();
    Err(Exit::failed(format!(
        "{}: {error}. Use `python -m krex`, or reinstall krex",
        program.display()
    )))
}

/// Where this program is.
pub fn own_path() -> Result<PathBuf, Exit> {
    std::fs::read_link("/proc/self/exe")
        .map_err(|error| Exit::failed(format!("/proc/self/exe: {error}. Mount /proc")))
}

/// Sends log messages to standard error, or to `file`, if `KREX_LOG` asks for any.
pub fn start_log(file: Option<std::fs::File>) {
    let (level, problem) = krex_core::logging::level();
    let mut builder = env_logger::Builder::new();
    builder.filter_level(level);
    if let Some(file) = file {
        builder.target(env_logger::Target::Pipe(Box::new(file)));
    }
    builder.format(|buffer, record| writeln!(buffer, "{}", krex_core::logging::line(record)));
    // It fails only if a log was started before.
    if let (Ok(()), Some(problem)) = (builder.try_init(), problem) {
        log::warn!("{problem}");
    }
}
