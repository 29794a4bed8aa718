//! Thawing without the segment: somebody truncated it, and whoever touches it dies of SIGBUS.
//!
//! A worker notes here what it froze, outside of shared memory, so that its SIGBUS handler can
//! thaw it with async-signal-safe calls alone.

use std::sync::atomic::{AtomicI32, Ordering};

/// Descriptors of `cgroup.freeze`, and processes that were stopped; zero: none.
static GROUPS: [AtomicI32; 1024] = [const { AtomicI32::new(0) }; 1024];
static PROCESSES: [AtomicI32; 4096] = [const { AtomicI32::new(0) }; 4096];

fn note(table: &[AtomicI32], value: i32) {
    // Relaxed: read by a handler in the same process, which only needs whole values.
    for place in table {
        if place.compare_exchange(0, value, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            return;
        }
    }
}

fn erase(table: &[AtomicI32], value: i32) {
    for place in table {
        let seen = place.load(Ordering::Relaxed);
        if seen == value {
            place.store(0, Ordering::Relaxed);
            return;
        }
    }
}

pub(super) fn note_group(descriptor: i32) {
    erase(&GROUPS, descriptor);
    note(&GROUPS, descriptor);
}

pub(super) fn erase_group(descriptor: i32) {
    erase(&GROUPS, descriptor);
}

pub(super) fn note_process(pid: i32) {
    note(&PROCESSES, pid);
}

pub(super) fn erase_process(pid: i32) {
    erase(&PROCESSES, pid);
}

extern "C" fn thaw_and_exit(_signal: libc::c_int) {
    for group in &GROUPS {
        let descriptor = group.load(Ordering::Relaxed);
        if descriptor != 0 {
            // SAFETY: pwrite is async-signal-safe; the byte lives through the call, and the
            // descriptor is open as long as it is noted.
            unsafe { libc::pwrite(descriptor, c"0".as_ptr().cast(), 1, 0) };
        }
    }
    for process in PROCESSES.iter().rev() {
        let pid = process.load(Ordering::Relaxed);
        if pid > 0 {
            // SAFETY: kill is async-signal-safe and takes two integers.
            unsafe { libc::kill(pid, libc::SIGCONT) };
        }
    }
    // SAFETY: _exit is async-signal-safe. Status 0: the keeper ends, too.
    unsafe { libc::_exit(0) };
}

/// Installs the handler; for workers only.
pub fn thaw_on_bus_error() {
    // SAFETY: the action is all zero but for a handler that makes async-signal-safe calls only.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(libc::c_int) = thaw_and_exit;
        action.sa_sigaction = handler as usize;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}
