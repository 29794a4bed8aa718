//! Making sure that a supervisor pair serves this PID namespace and user, and ringing for it.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::layout::{Layout, SUPERVISORS};
use crate::process::Identity;
use crate::segment::Segment;
use crate::sync;

/// How long a new pair may take to answer; a loaded machine needs a while to start a process.
const START_LIMIT: Duration = Duration::from_secs(20);

/// Tells a supervisor that there is something to look at.
pub fn ring(segment: &Layout, supervisor: usize) {
    let Some(supervisor) = segment.supervisors.get(supervisor) else {
        return;
    };
    // SeqCst: what was written before the ring is seen by whoever sees the new count; the worker
    // reads the count before it looks, so that a ring during its look is not lost.
    supervisor.doorbell.fetch_add(1, Ordering::SeqCst);
    sync::wake_all(&supervisor.doorbell);
}

/// The slots that serve `identity`'s namespace and user, lowest first.
fn slots_for(segment: &Layout, key: u64) -> impl Iterator<Item = usize> + '_ {
    (0..SUPERVISORS)
        .filter(move |slot| segment.supervisors[*slot].key.load(Ordering::Acquire) == key)
}

/// The supervisor slot of this namespace and user, if there ever was one.
pub fn find(segment: &Layout, identity: &Identity) -> Option<usize> {
    slots_for(segment, identity.supervisor_key()).next()
}

/// A running pair for `identity`, started from `program` if need be.
///
/// # Errors
/// [`Error::Supervisor`] if it does not come up; [`Error::Full`] if too many namespaces use the
/// segment.
pub fn ensure(segment: &Segment, identity: &Identity, program: &Path) -> Result<usize> {
    let key = identity.supervisor_key();
    let slot = match slots_for(segment, key).next() {
        Some(slot) => slot,
        None => claim(segment, key)?,
    };
    if serves(segment, slot) {
        return Ok(slot);
    }
    start(segment, slot, program)?;
    let session = &segment.supervisors[slot].session;
    let deadline = Deadline::after(START_LIMIT);
    loop {
        let seen = session.load(Ordering::SeqCst);
        if serves(segment, slot) {
            return Ok(slot);
        }
        if deadline.has_passed() {
            return Err(Error::Supervisor(format!(
                "{} did not answer within {} s. Try `KREX_LOG=debug`, and see krex.log in {}",
                program.display(),
                START_LIMIT.as_secs(),
                segment.directory().display()
            )));
        }
        if !segment.is_supervisor_alive(slot) {
            // One that we saw starting has gone again (unused, or killed).
            start(segment, slot, program)?;
        }
        sync::wait(session, seen, Duration::from_millis(50));
    }
}

/// Whether the pair in this slot runs and accepts tenants.
pub fn serves(segment: &Segment, slot: usize) -> bool {
    !segment.supervisors[slot].session.load(Ordering::SeqCst).is_multiple_of(2)
        && segment.is_supervisor_alive(slot)
}

fn claim(segment: &Segment, key: u64) -> Result<usize> {
    for slot in 0..SUPERVISORS {
        let word = &segment.supervisors[slot].key;
        match word.compare_exchange(0, key, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => return Ok(slot),
            Err(seen) if seen == key => return Ok(slot),
            Err(_) => {}
        }
    }
    // All in use: take over one whose namespace has gone, that is: no pair and no tenant.
    for slot in 0..SUPERVISORS {
        let word = &segment.supervisors[slot].key;
        let seen = word.load(Ordering::Acquire);
        let used = |tenant: usize| segment.tenants[tenant].owner().supervisor() == slot;
        if segment.is_supervisor_alive(slot) || segment.live_tenants.iter().any(used) {
            continue;
        }
        if word.compare_exchange(seen, key, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            return Ok(slot);
        }
    }
    Err(Error::Full { what: "supervisor", capacity: SUPERVISORS })
}

/// Starts the native program as a supervisor pair. If another pair was faster, it goes at once.
fn start(segment: &Segment, slot: usize, program: &Path) -> Result<()> {
    let started = Command::new(program)
        .arg("__supervise")
        .arg(segment.directory())
        .arg(slot.to_string())
        // Nothing of the caller's: a preloaded library of its, say, has no business there.
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"KREX_")))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .and_then(|child| child.wait_with_output());
    match started {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => {
            let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(Error::Supervisor(format!("{}: {message}", output.status)))
        }
        // Whoever ignores SIGCHLD cannot wait for children; whether it came up is seen anyway.
        Err(error) if error.raw_os_error() == Some(libc::ECHILD) => Ok(()),
        Err(error) => Err(explain(error, program)),
    }
}

fn explain(error: io::Error, program: &Path) -> Error {
    Error::Supervisor(format!(
        "{} cannot be started ({error}). Reinstall krex, so that its native program is there",
        program.display()
    ))
}
