//! What the core asks of the program that it is in; and log messages.

use std::ffi::{CStr, OsStr, c_void};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Once;

use krex_core::client;
use krex_core::error::{Error, Result};
use krex_core::logging;

/// A process into which the library was loaded: waits are never given up.
pub struct Preloaded;

impl client::Host for Preloaded {
    /// The native program, as the wheel lays it out: `bin/krex` and `lib/krex/libkrex_preload.so`;
    /// or beside the library, where cargo puts both.
    fn program(&self) -> Result<PathBuf> {
        let library = own_path().ok_or_else(|| missing(Path::new("libkrex_preload.so")))?;
        let beside = library.with_file_name("krex");
        let installed = library.ancestors().nth(3).map(|prefix| prefix.join("bin/krex"));
        installed
            .into_iter()
            .chain([beside])
            .find(|it| it.is_file())
            .ok_or_else(|| missing(&library))
    }

    fn interrupted(&self) -> bool {
        false // Whoever handles the signal runs when the driver's function has returned.
    }
}

fn missing(library: &Path) -> Error {
    Error::Supervisor(format!("no native program `krex` was found near {}", library.display()))
}

/// Where this library is.
fn own_path() -> Option<PathBuf> {
    // SAFETY: `info` is plain data, for which all zeros are valid, and dladdr fills it.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    let own: *const c_void = (own_path as fn() -> Option<PathBuf>) as *const c_void;
    // SAFETY: dladdr(address, info) accepts any address.
    if unsafe { libc::dladdr(own, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name that dladdr returned is zero-terminated.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
}

/// Log messages go to standard error, if `KREX_LOG` asks for any.
pub fn start_log() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        // What is wrong with it the launcher has said.
        let (level, _) = logging::level();
        // It fails only if a log was started before, in this library: never.
        let _ = log::set_logger(&StandardError);
        log::set_max_level(level);
    });
}

struct StandardError;

impl log::Log for StandardError {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = logging::line(record) + "\n";
        // There is nobody to tell if that cannot be written.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }

    fn flush(&self) {}
}
