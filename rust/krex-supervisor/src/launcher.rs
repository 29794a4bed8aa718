//! `krex run`: registers this process as a tenant, waits for a running region, and becomes the
//! command. No process stays in between, so exit codes, signals and job control are its own.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use krex_core::budget;
use krex_core::client::{self, Host, SLICE, Watch};
use krex_core::device;
use krex_core::freezer::Choice;
use krex_core::keep_off;
use krex_core::layout::DEVICES;
use krex_core::process::Identity;
use krex_core::reservation;
use krex_core::segment::{Segment, runtime_dir};
use krex_core::supervision;
use krex_core::tenant::{self, Registration};
use krex_core::word::Reference;
use krex_core::{clock, error};

use crate::options::{self, Options};
use crate::{Exit, own_path};

/// Exit statuses of a command that could not be started, as every shell has them.
const NOT_EXECUTABLE: i32 = 126;
const NOT_FOUND: i32 = 127;

struct Native {
    program: PathBuf,
}

impl Host for Native {
    fn program(&self) -> error::Result<PathBuf> {
        Ok(self.program.clone())
    }

    fn interrupted(&self) -> bool {
        false // Signals have the caller's dispositions: SIGINT ends the process.
    }
}

/// Runs the command line after `krex run`; returns only if it fails, or for `--help`.
pub fn run(words: Vec<OsString>) -> Result<(), Exit> {
    let Some(mut options) = options::parse(words)? else {
        return match crate::print(options::HELP) {
            0 => Ok(()),
            status => Err(Exit { status, message: "standard output cannot be written".to_owned() }),
        };
    };
    crate::start_log(None);
    let command = find(&options.command[0])?;
    // Else the command would be told at its first region, perhaps minutes later.
    budget::max_closed().map_err(Exit::usage)?;
    for device in &mut options.devices {
        *device = resolve(device)?;
    }
    let host = Native { program: own_path()? };
    let directory = runtime_dir().map_err(Exit::failed)?;
    let segment = Segment::open_or_create(&directory).map_err(Exit::failed)?;
    let identity = Identity::of_self().map_err(Exit::failed)?;
    // Before it is registered: from then on a region may count it among its siblings.
    let preloaded = crate::preload::set(&host.program);
    let (supervisor, reference) = register(&segment, &identity, &options, &host, preloaded)?;
    keep_off::keep_self_off(&segment, reference.slot);
    wait_for_admission(&segment, &identity, supervisor, reference, &host);
    krex_core::hooks::fault("admitted");
    if krex_core::hooks::sabotaged("exec") {
        let status = std::process::Command::new(&command).args(&options.command[1..]).status();
        return Err(Exit {
            status: i32::from(!status.is_ok_and(|it| it.success())),
            message: String::new(),
        });
    }
    if krex_core::hooks::sabotaged("sigpipe") {
        // SAFETY: SIG_IGN runs no code of ours.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    }
    let error = execute(&command, &options.command);
    // Nothing of it ran: the slot is given back at once.
    if let Some(tenant) = tenant::resolve(&segment, reference) {
        let cleaner = tenant::Cleaner { pid: identity.pid, supervisor };
        tenant::release(&segment, reference.slot, tenant.owner(), cleaner, || {});
    }
    if error.raw_os_error() == Some(libc::ENOENT) && command.exists() {
        let word = options.command[0].to_string_lossy();
        let message = format!("{word}: the interpreter in its first line was not found");
        return Err(Exit { status: NOT_FOUND, message });
    }
    Err(cannot_start(&options.command[0], &error))
}

/// The device that the user means. An index is looked up before the command runs, without a time
/// limit: a driver that hangs is better seen here than in the command.
fn resolve(device: &str) -> Result<String, Exit> {
    krex_nvml::resolve(device).map(Into::into).map_err(|error| match error {
        error::Error::Nvml { .. } => Exit::failed(error),
        error => Exit::usage(error),
    })
}

fn register(
    segment: &Segment,
    identity: &Identity,
    options: &Options,
    host: &Native,
    preloaded: bool,
) -> Result<(usize, Reference), Exit> {
    let known = supervision::find(segment, identity);
    let parent = tenant::find_own(segment, known, identity);
    let mut devices = Vec::new();
    for name in &options.devices {
        devices.push(device::find_or_add(segment, name).map_err(Exit::failed)?);
    }
    let of_parent = parent.and_then(|reference| tenant::resolve(segment, reference));
    let (mask, default_device) = match (devices.first(), of_parent) {
        (Some(first), _) => (devices.iter().fold(0, |mask, it| mask | 1 << it), Some(*first)),
        (None, Some(parent)) => (
            parent.devices.load(Ordering::SeqCst),
            parent.default_device.load(Ordering::Relaxed).checked_sub(1).map(|it| it as usize),
        ),
        (None, None) => {
            let default = device::find_or_add(segment, device::DEFAULT).map_err(Exit::failed)?;
            (1 << default, None)
        }
    };
    for index in (0..DEVICES).filter(|index| mask & (1 << index) != 0) {
        reservation::allot(segment, index).map_err(Exit::usage)?;
    }
    let name = options.name.clone().unwrap_or_else(|| default_name(&options.command));
    let time_limit = options.time_limit.map_or(0, clock::nanoseconds);
    if let (Some(reference), Some(tenant)) = (parent, of_parent)
        && tenant.owner().pid() == identity.pid
        && tenant.start_time.load(Ordering::Acquire) == identity.start_time
        && Some(tenant.owner().supervisor()) == known
    {
        // `krex run krex run COMMAND`: this process is a tenant already. The inner one's word
        // counts where it says something.
        tenant.preloaded.fetch_or(preloaded.into(), Ordering::Relaxed);
        tenant.devices.store(mask, Ordering::SeqCst);
        tenant.default_device.store(default_device.map_or(0, |it| it as u64 + 1), Ordering::SeqCst);
        tenant.name.set(name.as_bytes());
        if options.kill_stuck {
            tenant.on_stuck.store(1, Ordering::SeqCst);
        }
        if time_limit != 0 {
            tenant.time_limit.store(time_limit, Ordering::SeqCst);
        }
        return Ok((tenant.owner().supervisor(), reference));
    }
    let registration = Registration {
        name,
        devices: mask,
        default_device,
        parent,
        freezer: Choice::from_environment().map_err(Exit::usage)?,
        time_limit,
        on_stuck: options.kill_stuck,
        preloaded,
        attached: false,
    };
    client::register_supervised(segment, identity, host, &registration).map_err(Exit::failed)
}

/// The command's base name with its first argument, as people call it.
fn default_name(command: &[OsString]) -> String {
    let base = |word: &OsString| {
        let word = word.to_string_lossy();
        word.rsplit('/').next().unwrap_or_default().to_owned()
    };
    let mut name = base(&command[0]);
    if let Some(script) = command.get(1).filter(|word| !word.as_bytes().starts_with(b"-")) {
        name = format!("{name} {}", base(script));
    }
    name
}

/// Waits until the regions that did not count this tenant among their siblings are over. Later
/// ones do, since it is registered: no need to find the gate open at the right moment.
fn wait_for_admission(
    segment: &Segment,
    identity: &Identity,
    supervisor: usize,
    reference: Reference,
    host: &Native,
) {
    let Some(tenant) = tenant::resolve(segment, reference) else {
        return;
    };
    tenant.start_waiting(clock::now());
    let mut next_look = Watch::default();
    for index in device::in_use(segment).filter(|index| tenant.shares(*index)) {
        let gate = segment.devices[index].gate();
        let first = gate.load();
        loop {
            let word = gate.load();
            let over = word.is_open() || word.tenure() != first.tenure();
            let within = tenant::descends_from(segment, reference.slot, word.holder());
            if over || within || segment.is_retired() || krex_core::hooks::sabotaged("admission") {
                break;
            }
            gate.wait_change(word, SLICE);
            if next_look.is_due() {
                let _ = supervision::revive(segment, identity, supervisor, || host.program());
            }
        }
    }
    tenant.stop_waiting(1, clock::now());
}

/// Looks the command up as execvp(3) does, before anything is registered for it.
fn find(word: &OsStr) -> Result<PathBuf, Exit> {
    if word.is_empty() {
        return Err(cannot_start(word, &io::Error::from_raw_os_error(libc::ENOENT)));
    }
    if word.as_bytes().contains(&b'/') {
        return match check(Path::new(word)) {
            Ok(()) => Ok(PathBuf::from(word)),
            Err(error) => Err(cannot_start(word, &error)),
        };
    }
    let mut error = io::Error::from_raw_os_error(libc::ENOENT);
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    for directory in std::env::split_paths(&path) {
        let candidate =
            if directory.as_os_str().is_empty() { Path::new(".") } else { &directory }.join(word);
        match check(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(found) if found.kind() == io::ErrorKind::NotFound => {}
            Err(found) if found.raw_os_error() == Some(libc::ENOTDIR) => {}
            Err(found) => error = found,
        }
    }
    Err(cannot_start(word, &error))
}

fn check(path: &Path) -> io::Result<()> {
    if std::fs::metadata(path)?.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EACCES));
    }
    // With the effective ids and capabilities, as the kernel asks when it executes.
    use rustix::fs::{Access, AtFlags, CWD, accessat};
    accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS)?;
    Ok(())
}

fn cannot_start(word: &OsStr, error: &io::Error) -> Exit {
    let word = word.to_string_lossy();
    match error.raw_os_error() {
        Some(libc::ENOENT) => {
            Exit { status: NOT_FOUND, message: format!("{word}: command not found") }
        }
        _ => Exit { status: NOT_EXECUTABLE, message: format!("{word}: {error}") },
    }
}

/// Becomes the command. Returns only if that fails.
fn execute(path: &Path, command: &[OsString]) -> io::Error {
    let c_string = |word: &OsStr| CString::new(word.as_bytes());
    let words: Result<Vec<CString>, _> = command.iter().map(|word| c_string(word)).collect();
    let (Ok(path), Ok(words)) = (c_string(path.as_os_str()), words) else {
        return io::ErrorKind::InvalidInput.into();
    };
    let mut pointers: Vec<*const libc::c_char> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: execvp(path, argv): both are zero-terminated strings and a null-terminated array
    // of such, alive through the call. The path has a slash, so that it is not searched again;
    // execvp, since it runs scripts without an interpreter line by /bin/sh, as every shell does.
    unsafe { libc::execvp(path.as_ptr(), pointers.as_ptr()) };
    io::Error::last_os_error()
}
