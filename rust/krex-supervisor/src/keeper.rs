//! The other half of a supervisor: waits for the worker's end, or its stop, and takes over.
//!
//! The pair shares one record lock, taken before the fork: it is free only when both are gone.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use krex_core::cgroup::{self, Group, Mount};
use krex_core::clock;
use krex_core::layout::SUPERVISORS;
use krex_core::process;
use krex_core::recover::{remove_empty_groups, take_over};
use krex_core::segment::Segment;
use krex_core::sync;

use crate::worker::{End, Worker};
use crate::{Exit, start_log};

/// `krex __supervise DIRECTORY SLOT`: becomes the pair of this slot, in the background. If there
/// is one already, that is as good.
pub fn start(words: &[OsString]) -> Result<(), Exit> {
    let [directory, slot] = words else {
        return Err(Exit::usage("__supervise DIRECTORY SLOT is for krex itself"));
    };
    let slot: Option<usize> = slot.to_str().and_then(|it| it.parse().ok());
    let slot = slot.filter(|it| *it < SUPERVISORS).ok_or_else(|| Exit::usage("no such slot"))?;
    let directory = Path::new(directory);
    let Some(segment) = Segment::open(directory).map_err(Exit::failed)? else {
        return Err(Exit::failed(format!("{}: the segment is gone", directory.display())));
    };
    let Some(lock) = segment.lock_supervisor(slot).map_err(Exit::failed)? else {
        return Ok(());
    };
    let log = log_file(directory);
    match fork().map_err(Exit::failed)? {
        Some(_) => Ok(()),
        None => {
            detach();
            start_log(log);
            serve(Box::leak(Box::new(segment)), slot, lock)
        }
    }
}

fn log_file(directory: &Path) -> Option<File> {
    std::env::var_os("KREX_LOG")?;
    use std::os::unix::fs::OpenOptionsExt;
    let path = directory.join("krex.log");
    File::options().append(true).create(true).mode(0o600).open(path).ok()
}

/// `fork(2)`: the child's id in the parent, `None` in the child.
fn fork() -> io::Result<Option<i32>> {
    // SAFETY: the child goes on with plain Rust code; glibc's fork handlers leave its allocator
    // usable, and no lock of ours is held by another thread: a keeper has none, and a worker
    // that becomes keeper has one that only waits for events.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        child => Ok(Some(child)),
    }
}

/// Away from everything of whoever started us: terminal, process group, descriptors, signals,
/// working directory, and a tenant's cgroup.
fn detach() {
    let _ = rustix::process::setsid();
    let _ = rustix::process::chdir("/");
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdin(&null);
        let _ = rustix::stdio::dup2_stdout(&null);
        let _ = rustix::stdio::dup2_stderr(&null);
    }
    reset_signals();
    leave_tenants_group();
    lift_confinements();
}

/// The pair serves everybody, so it keeps nothing of what the command that happened to need it
/// first was confined to.
fn lift_confinements() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    for resource in [Resource::Cpu, Resource::Fsize, Resource::Nofile] {
        let mut limit = getrlimit(resource);
        limit.current = limit.maximum;
        let _ = setrlimit(resource, limit);
    }
    // Three descriptors a tenant; who may, takes enough for all.
    let enough = rustix::process::Rlimit { current: Some(8192), maximum: Some(8192) };
    if getrlimit(Resource::Nofile).maximum.is_some_and(|it| it < 8192) {
        let _ = setrlimit(Resource::Nofile, enough);
    }
    let all =
        (0..rustix::thread::CpuSet::MAX_CPU).fold(rustix::thread::CpuSet::new(), |mut all, cpu| {
            all.set(cpu);
            all
        });
    let _ = rustix::thread::sched_setaffinity(None, &all);
    if rustix::process::getpriority_process(None).is_ok_and(|nice| nice > 0) {
        let _ = rustix::process::setpriority_process(None, 0);
    }
    shorten_slice(); // It also goes back to the ordinary scheduling policy.
}

/// Out of a tenant's cgroup, which would be frozen with it.
pub fn leave_tenants_group() {
    let own = cgroup::path_of("self").unwrap_or_default();
    if let Some(group) = cgroup::tenants_group(&own)
        && let (Some((parent, _)), Some(mount)) = (group.rsplit_once('/'), Mount::find())
        && let Some(directory) = mount.directory(if parent.is_empty() { "/" } else { parent })
        && let Err(error) = (Group { directory }).take(0)
    {
        log::error!("the supervisor cannot leave its tenant's cgroup: {error}");
    }
}

/// Signals that end a whole group or terminal must not leave tenants frozen: the pair ends by
/// itself as soon as it has no tenant.
fn reset_signals() {
    for signal in 1..=31 {
        let disposition = match signal {
            libc::SIGTERM | libc::SIGINT | libc::SIGHUP | libc::SIGQUIT | libc::SIGPIPE => {
                libc::SIG_IGN
            }
            _ => libc::SIG_DFL,
        };
        // SAFETY: signal(2) with SIG_IGN or SIG_DFL runs no code of ours; it fails harmlessly
        // for SIGKILL and SIGSTOP.
        unsafe { libc::signal(signal, disposition) };
    }
    // SAFETY: the set is initialised by sigemptyset before it is used; the old mask is not asked
    // for.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// The keeper's life. Never returns.
fn serve(segment: &'static Segment, slot: usize, lock: File) -> ! {
    remove_empty_groups(segment);
    close_others(&[&lock]);
    let status = keep(segment, slot);
    drop(lock);
    std::process::exit(status);
}

/// Closes what was inherited without the close-on-exec mark, except the standard streams.
fn close_others(keep: &[&File]) {
    use std::os::fd::AsRawFd;
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else {
        return;
    };
    let numbers: Vec<i32> =
        entries.flatten().filter_map(|it| it.file_name().to_str()?.parse().ok()).collect();
    for number in numbers.into_iter().filter(|number| *number > 2) {
        if keep.iter().any(|file| file.as_raw_fd() == number) {
            continue;
        }
        // SAFETY: F_GETFD only asks; it fails for a number that is not open.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        if flags >= 0 && flags & libc::FD_CLOEXEC == 0 {
            // SAFETY: a descriptor without the mark is inherited: this program opens all of its
            // own with it, so nobody here owns the number.
            unsafe { libc::close(number) };
        }
    }
}

fn keep(segment: &'static Segment, slot: usize) -> i32 {
    name_process(c"krex-keeper");
    let supervisor = &segment.supervisors[slot];
    let own = rustix::process::getpid().as_raw_nonzero().get();
    supervisor.keeper.store(own as u64, Ordering::Release);
    let mut quick_ends = 0_u32;
    loop {
        // Whatever the last worker left frozen; the new one freezes again what should be.
        krex_core::hooks::fault("taking_over");
        if !krex_core::hooks::sabotaged("take_over") {
            take_over(segment, slot);
        }
        let Some(stat) = process::Stat::of_self() else {
            return 1;
        };
        let started = clock::now();
        let worker = match fork() {
            Ok(Some(worker)) => worker,
            Ok(None) => work(segment, slot, stat),
            Err(error) => {
                log::error!("no worker: {error}");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if wait_for(worker) == Some(0) {
            return 0;
        }
        log::warn!("the worker {worker} ended or was stopped: starting another");
        quick_ends = if clock::now() - started < clock::SECOND { quick_ends + 1 } else { 0 };
        if quick_ends > 3 {
            take_over(segment, slot); // Nobody stays frozen during the pause.
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Waits until the worker ends or is stopped; a stopped one is killed. Returns its exit code.
fn wait_for(worker: i32) -> Option<i32> {
    use rustix::process::{Pid, WaitOptions, waitpid};
    let pid = Pid::from_raw(worker)?;
    loop {
        match waitpid(Some(pid), WaitOptions::UNTRACED) {
            Ok(Some((_, status))) if status.stopped() => {
                if krex_core::hooks::sabotaged("replace_worker") {
                    continue;
                }
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            Ok(Some((_, status))) => return status.exit_status(),
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// The worker's life, in the forked child. Never returns.
fn work(segment: &'static Segment, slot: usize, keeper: process::Stat) -> ! {
    name_process(c"krex-worker");
    shorten_slice();
    sharpen_timers();
    krex_core::freezer::emergency::thaw_on_bus_error();
    let supervisor = &segment.supervisors[slot];
    let own = rustix::process::getpid().as_raw_nonzero().get();
    supervisor.worker.store(own as u64, Ordering::Release);
    let worker = match Worker::new(segment, slot, keeper) {
        Ok(worker) => worker,
        Err(error) => {
            log::error!("the worker cannot start: {error}");
            std::process::exit(1);
        }
    };
    // From here on tenants are accepted. SeqCst: see `Worker::is_unused`.
    if supervisor.session.load(Ordering::SeqCst).is_multiple_of(2) {
        supervisor.session.fetch_add(1, Ordering::SeqCst);
    }
    sync::wake_all(&supervisor.session);
    match worker.run(segment) {
        End::Unused => std::process::exit(0),
        // This process becomes the keeper: first of all nobody stays frozen.
        End::KeeperDied => std::process::exit(keep(segment, slot)),
    }
}

fn name_process(name: &std::ffi::CStr) {
    let _ = rustix::thread::set_name(name);
}

/// Freezing is looked at again after some ten microseconds.
fn sharpen_timers() {
    // SAFETY: prctl(PR_SET_TIMERSLACK, nanoseconds) takes two integers.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000_u64) };
}

/// A short scheduler slice (0.1 ms), so that the worker runs soon also beside busy processes. A
/// real-time priority would do worse: it starves whom it serves.
fn shorten_slice() {
    #[repr(C)]
    struct SchedulingAttributes {
        size: u32,
        policy: u32,
        flags: u64,
        nice: i32,
        priority: u32,
        runtime: u64,
        deadline: u64,
        period: u64,
    }
    let attributes = SchedulingAttributes {
        size: size_of::<SchedulingAttributes>() as u32,
        policy: 0, // SCHED_OTHER
        flags: 0,
        nice: rustix::process::getpriority_process(None).unwrap_or(0),
        priority: 0,
        runtime: 100_000,
        deadline: 0,
        period: 0,
    };
    // SAFETY: sched_setattr(pid 0 = the caller, attributes, flags 0) reads a struct whose first
    // field tells its size; it lives through the call. Kernels without slices ignore the value.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
}
