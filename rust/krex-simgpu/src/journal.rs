//! What reached the driver, one line each, for tests.

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use crate::settings::Settings;
use crate::system;

/// A file `journal.PID` in the device's directory, if tests asked for one.
#[derive(Debug)]
pub struct Journal(Option<File>);

impl Journal {
    pub fn open(settings: &Settings) -> Self {
        let file = settings.directory.as_ref().filter(|_| settings.journal).and_then(|it| {
            OpenOptions::new()
                .create(true)
                .append(true)
                .mode(0o600)
                .open(it.join(format!("journal.{}", system::process_id())))
                .ok()
        });
        Self(file)
    }

    /// Appends `nanoseconds pid tid entry stream kind`.
    pub fn write(&self, entry: &str, stream: usize, kind: &str) {
        let Some(file) = &self.0 else { return };
        let mut line = String::new();
        let (time, process, thread) = (system::now(), system::process_id(), system::thread_id());
        let _ = writeln!(line, "{time} {process} {thread} {entry} {stream:#x} {kind}");
        system::append(file.as_raw_fd(), line.as_bytes());
    }
}
