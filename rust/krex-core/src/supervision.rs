//! Making sure that a supervisor pair serves this PID namespace and user, and ringing for it.

use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::layout::{Layout, SUPERVISORS};
use crate::process::{self, Identity, Stat};
use crate::segment::{Segment, above_standard_streams};
use crate::sync;
use rustix::process::Signal;

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

/// Makes sure that the pair in `slot`, which serves the caller's namespace, is there and able to
/// work: one of which both halves were killed is started again, and one of which both were stopped
/// (which neither can see to) is replaced. For those who wait for its answer.
///
/// # Errors
/// As [`ensure`].
pub fn revive(
    segment: &Segment,
    identity: &Identity,
    slot: usize,
    program: impl FnOnce() -> Result<PathBuf>,
) -> Result<()> {
    if segment.is_supervisor_alive(slot) {
        let halves = halves(segment, slot);
        if halves.is_empty() {
            // Both were killed, and have not quite ended: the lock is theirs for a moment yet.
            await_end(segment, slot);
        } else if halves.len() == 2 && halves.iter().all(|it| it.is_stopped()) {
            log::info!("both halves of the supervisor were stopped: replacing them");
            kill_pair(segment, slot);
        } else {
            return Ok(());
        }
    }
    ensure(segment, identity, &program()?).map(drop)
}

/// The processes of a pair of this namespace: keeper first. Process ids are reused, and the
/// segment may be damaged, so they are asked who they are.
fn halves(segment: &Segment, slot: usize) -> Vec<Stat> {
    let supervisor = &segment.supervisors[slot];
    let is_half = |pid: i32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
        words.get(1) == Some(&b"__supervise".as_slice())
            && words.get(2) == Some(&segment.directory().as_os_str().as_bytes())
    };
    [&supervisor.keeper, &supervisor.worker]
        .into_iter()
        .map(|word| word.load(Ordering::Acquire) as i32)
        .filter_map(|pid| Stat::of(pid).filter(|it| it.is_supervisor && is_half(pid)))
        .collect()
}

/// Kills both halves of this namespace's pair; the keeper first, which would start another worker.
pub fn kill_pair(segment: &Segment, slot: usize) {
    for half in halves(segment, slot) {
        let _ = process::signal_exactly(half.pid, half.start_time, Signal::KILL);
    }
    await_end(segment, slot);
}

/// Waits until a pair that was killed has let go of its lock.
fn await_end(segment: &Segment, slot: usize) {
    let deadline = Deadline::after(Duration::from_secs(1));
    while segment.is_supervisor_alive(slot) && !deadline.has_passed() {
        std::thread::sleep(Duration::from_millis(1));
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
    let slot = slot.to_string();
    let words = [program.as_os_str(), "__supervise".as_ref(), segment.directory().as_ref()];
    let words = words.into_iter().chain([slot.as_ref()]);
    match run_unnoticed(program, words) {
        Ok((0, _)) => Ok(()),
        Ok((status, message)) => {
            Err(Error::Supervisor(format!("status {status}: {}", message.trim())))
        }
        Err(error) => Err(Error::Supervisor(format!(
            "{} cannot be started ({error}). Reinstall krex, so that its native program is there",
            program.display()
        ))),
    }
}

/// Runs a program to its end without the caller's noticing: its end sends no SIGCHLD, and no
/// `wait` of the caller's for any child sees it. It gets nothing of the caller's environment but
/// krex's own variables: a preloaded library, say, has no business there. Returns its status and
/// what it wrote to standard error.
fn run_unnoticed<'a>(
    program: &Path,
    words: impl Iterator<Item = &'a OsStr>,
) -> io::Result<(i32, String)> {
    let text = |bytes: &[u8]| CString::new(bytes).map_err(io::Error::from);
    let path = text(program.as_os_str().as_bytes())?;
    let words = words.map(|it| text(it.as_bytes())).collect::<io::Result<Vec<_>>>()?;
    let environment = std::env::vars_os()
        .filter(|(name, _)| name.as_bytes().starts_with(b"KREX_"))
        .map(|(name, value)| text(&[name.as_bytes(), b"=", value.as_bytes()].concat()))
        .collect::<io::Result<Vec<_>>>()?;
    let pointers = |list: &[CString]| {
        let ends = [std::ptr::null()];
        list.iter().map(|it| it.as_ptr()).chain(ends).collect::<Vec<*const libc::c_char>>()
    };
    let (argv, envp) = (pointers(&words), pointers(&environment));
    std::fs::metadata(program)?;
    let (reader, writer) = io::pipe()?;
    let writer = above_standard_streams(std::fs::File::from(OwnedFd::from(writer)))?;
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    let null = above_standard_streams(null)?;
    let (writer_number, null_number) = (writer.as_raw_fd(), null.as_raw_fd());
    // SAFETY: clone(flags = 0, no stack) forks: the child has a copy of this thread alone. The
    // exit signal in the low byte of the flags is 0: nobody is told of its end. (Executing would
    // set it to SIGCHLD, so the child only stands between.) It only makes async-signal-safe calls
    // on what was prepared above, and then exits.
    let child = unsafe { libc::syscall(libc::SYS_clone, 0, 0, 0, 0, 0) };
    if child == 0 {
        // SAFETY: signal, clone, dup2, execve, waitpid and _exit are async-signal-safe; the
        // pointers are to zero-terminated strings and null-terminated arrays, of which each
        // child has a copy.
        unsafe {
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            let program = libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0);
            if program == 0 {
                libc::dup2(null_number, 0);
                libc::dup2(null_number, 1);
                libc::dup2(writer_number, 2);
                libc::execve(path.as_ptr(), argv.as_ptr(), envp.as_ptr());
                libc::_exit(127);
            }
            let mut status = 0;
            let waited = libc::waitpid(program as i32, &raw mut status, 0);
            let is_good = program > 0 && waited > 0 && libc::WIFEXITED(status);
            libc::_exit(if is_good { libc::WEXITSTATUS(status) } else { 126 });
        }
    }
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    drop(writer);
    let mut message = Vec::new();
    let read = io::Read::read_to_end(&mut { reader }, &mut message);
    let mut status = 0;
    // SAFETY: waitpid on our own child writes to `status`, which lives through the call. __WALL:
    // without an exit signal it is not an ordinary child.
    while unsafe { libc::waitpid(child as i32, &raw mut status, libc::__WALL) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    read?;
    let status = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 };
    Ok((status, String::from_utf8_lossy(&message).into_owned()))
}
