//! Freezing by cgroup v2: one write freezes the group, also what is born in it meanwhile.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use super::{Freezer, ProcessTable, emergency};
use crate::cgroup::Group;

/// Freezes a group of krex's own. A frozen process still dies of SIGKILL, and its parent's
/// `wait` sees nothing of it.
#[derive(Debug)]
pub struct Cgroup2 {
    control: File,
    events: File,
}

impl Cgroup2 {
    /// # Errors
    /// If the group is gone or its files cannot be opened.
    pub fn open(group: &Group) -> io::Result<Self> {
        Ok(Self {
            control: OpenOptions::new().write(true).open(group.directory.join("cgroup.freeze"))?,
            events: File::open(group.directory.join("cgroup.events"))?,
        })
    }

    /// A group that was removed has no tasks left, frozen or not.
    fn write(&self, value: &[u8]) -> io::Result<()> {
        match self.control.write_all_at(value, 0) {
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
            result => result,
        }
    }
}

impl Freezer for Cgroup2 {
    fn start(&mut self, _processes: &mut ProcessTable) -> io::Result<()> {
        emergency::note_group(self.control.as_raw_fd());
        self.write(b"1")
    }

    fn is_frozen(&mut self, _processes: &mut ProcessTable) -> io::Result<bool> {
        // Re-read instead of polled: notifications come at most 100 times a second.
        let mut buffer = [0; 128];
        match self.events.read_at(&mut buffer, 0) {
            Ok(length) => {
                let mut lines = buffer[..length].split(|byte| *byte == b'\n');
                Ok(lines.any(|line| line == b"frozen 1" || line == b"populated 0"))
            }
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(true),
            Err(error) => Err(error),
        }
    }

    fn is_still_frozen(&mut self, processes: &mut ProcessTable) -> io::Result<bool> {
        self.is_frozen(processes)
    }

    fn thaw(&mut self) -> io::Result<()> {
        // Also after a freeze that did not complete in time: it would complete later.
        self.write(b"0")?;
        emergency::erase_group(self.control.as_raw_fd());
        Ok(())
    }
}

impl Drop for Cgroup2 {
    fn drop(&mut self) {
        emergency::erase_group(self.control.as_raw_fd());
    }
}
