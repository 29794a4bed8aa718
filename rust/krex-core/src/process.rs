//! Processes as the kernel tells of them: `/proc`, pidfds, PID namespaces.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal};

use crate::error::{Error, Result};

/// What the two halves of a supervisor pair call themselves.
pub const SUPERVISOR_NAMES: [&str; 2] = ["krex-keeper", "krex-worker"];

/// What krex reads from `/proc/PID/stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    pub pid: i32,
    pub parent: i32,
    /// `R`, `S`, `D`, `T`, `t`, `Z`, `X`…
    pub state: u8,
    /// In clock ticks since boot: tells a reused process id.
    pub start_time: u64,
    /// User and system time, in clock ticks.
    pub cpu_ticks: u64,
    pub threads: u64,
    /// It is half of a supervisor pair, which must run while everybody else is stopped.
    pub is_supervisor: bool,
}

impl Stat {
    /// Parses a line of `/proc/PID/stat`. The name in parentheses may hold anything, also
    /// spaces and parentheses, so the fields are counted from the *last* closing one.
    pub fn parse(line: &str) -> Option<Self> {
        let (head, tail) = line.rsplit_once(')')?;
        let (pid, name) = head.split_once(' ')?;
        let pid = pid.parse().ok()?;
        let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
        Some(Self {
            pid,
            state: *fields.first()?.as_bytes().first()?,
            parent: fields.get(1)?.parse().ok()?,
            cpu_ticks: number(11)? + number(12)?,
            start_time: number(19)?,
            threads: number(17)?,
            is_supervisor: SUPERVISOR_NAMES.iter().any(|it| name.strip_prefix('(') == Some(it)),
        })
    }

    /// Reads `/proc/PID/stat`; `None` if there is no such process.
    pub fn of(pid: i32) -> Option<Self> {
        Self::read(&format!("/proc/{pid}/stat"))
    }

    pub fn of_self() -> Option<Self> {
        Self::read("/proc/self/stat")
    }

    /// Reads a `stat` file in one go: it is short, and there may be very many.
    pub fn read(path: &str) -> Option<Self> {
        let mut buffer = [0; 1024];
        let length = io::Read::read(&mut fs::File::open(path).ok()?, &mut buffer).ok()?;
        Self::parse(&String::from_utf8_lossy(&buffer[..length]))
    }

    /// It has stopped running for good, though its parent may not have waited for it yet. A
    /// main thread that ended while others run is a zombie too, but the process goes on.
    pub fn has_ended(self) -> bool {
        matches!(self.state, b'Z' | b'X') && self.threads <= 1
    }

    pub fn is_stopped(self) -> bool {
        matches!(self.state, b'T' | b't')
    }
}

/// How often the calling process has a file mapped, from its beginning.
pub fn mappings_of(inode: u64) -> usize {
    let maps = read_lossy("/proc/self/maps").unwrap_or_default();
    let is_ours = |line: &&str| {
        // address, permissions, offset, device, inode, path
        let mut fields = line.split_ascii_whitespace().skip(2);
        let begins = fields.next().is_some_and(|it| it.bytes().all(|byte| byte == b'0'));
        begins && fields.nth(1).and_then(|it| it.parse().ok()) == Some(inode)
    };
    maps.lines().filter(is_ours).count()
}

fn read_lossy(path: &str) -> Option<String> {
    fs::read(path).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

/// Whether this process certainly has no children; much quicker than looking for them. A kernel
/// without lists of children (`CONFIG_PROC_CHILDREN`) leaves it open.
pub fn has_no_children() -> bool {
    let Ok(threads) = fs::read_dir("/proc/self/task") else { return false };
    let is_empty = |it: fs::DirEntry| {
        fs::read(it.path().join("children")).is_ok_and(|children| children.is_empty())
    };
    threads.flatten().all(is_empty)
}

/// `waitid(P_ALL)`, without waiting: whether this process has no children at all, not even ended
/// ones. Nothing is read, but grandchildren without parents are not seen.
pub fn is_childless() -> bool {
    // SAFETY: `siginfo_t` is a plain C struct, for which all zero is valid.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    // SAFETY: waitid writes to the struct, which lives through the call; with WNOWAIT it leaves
    // the children as they are.
    let result = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, options) };
    result < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ECHILD)
}

/// All processes that `/proc` showed at one time.
#[derive(Debug, Default)]
pub struct Processes {
    all: HashMap<i32, Stat>,
    children: HashMap<i32, Vec<i32>>,
}

impl Processes {
    pub fn read() -> Self {
        let Ok(entries) = fs::read_dir("/proc") else { return Self::default() };
        entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter_map(Stat::of)
            .collect()
    }

    pub fn get(&self, pid: i32) -> Option<&Stat> {
        self.all.get(&pid)
    }

    pub fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.all.keys().copied()
    }

    /// The `roots`, their children, their children…: ancestors before descendants. A process for
    /// which `skip` holds is left out, and all below it.
    pub fn tree(&self, roots: &[i32], skip: impl Fn(i32) -> bool) -> Vec<Stat> {
        let mut found: Vec<Stat> = Vec::new();
        let mut seen = HashSet::new();
        let mut add = |found: &mut Vec<Stat>, pid: i32| {
            if let Some(stat) = self.all.get(&pid)
                && !skip(pid)
                && seen.insert(pid)
            {
                found.push(*stat);
            }
        };
        roots.iter().for_each(|pid| add(&mut found, *pid));
        let mut next = 0;
        while let Some(process) = found.get(next) {
            next += 1;
            for child in self.children.get(&process.pid).into_iter().flatten() {
                add(&mut found, *child);
            }
        }
        found
    }
}

impl FromIterator<Stat> for Processes {
    fn from_iter<I: IntoIterator<Item = Stat>>(stats: I) -> Self {
        let mut processes = Self::default();
        for stat in stats {
            processes.children.entry(stat.parent).or_default().push(stat.pid);
            processes.all.insert(stat.pid, stat);
        }
        processes
    }
}

/// The parent, grandparent… of `pid`, nearest first, as far as this PID namespace shows them.
pub fn ancestors(pid: i32) -> impl Iterator<Item = Stat> {
    let mut next = Stat::of(pid).map_or(0, |stat| stat.parent);
    let mut left = 1 << 12; // /proc is read at different moments: no endless walk
    std::iter::from_fn(move || {
        if next <= 0 || left == 0 {
            return None;
        }
        left -= 1;
        let stat = Stat::of(next)?;
        next = stat.parent;
        Some(stat)
    })
}

/// `pidfd_open(pid, 0)`: a handle that never means another process.
pub fn open_pidfd(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?)
}

/// The pidfd of the process that started at `start_time`; `None` if it has gone.
pub fn open_exactly(pid: i32, start_time: u64) -> Option<OwnedFd> {
    let pidfd = open_pidfd(pid).ok()?;
    // The order matters: the handle is bound first, then its start time is looked at.
    let stat = Stat::of(pid)?;
    (stat.start_time == start_time).then_some(pidfd)
}

/// Whether the process that started at `start_time` still runs (a zombie does not).
pub fn is_alive(pid: i32, start_time: u64) -> bool {
    match Stat::of(pid) {
        Some(stat) => stat.start_time == start_time && !stat.has_ended(),
        // Gone, or no descriptor is left to read with: signal 0 needs none.
        None => {
            let pid = Pid::from_raw(pid);
            pid.is_some_and(|pid| {
                rustix::process::test_kill_process(pid) != Err(rustix::io::Errno::SRCH)
            })
        }
    }
}

/// Sends `signal` to exactly that process.
pub fn signal_exactly(pid: i32, start_time: u64, signal: Signal) -> io::Result<()> {
    let Some(pidfd) = open_exactly(pid, start_time) else {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    };
    Ok(rustix::process::pidfd_send_signal(pidfd, signal)?)
}

/// The process that a supervisor of another PID namespace knows as `pid`, as this namespace
/// numbers it; `None` if that namespace is not below this one.
pub fn find_foreign(supervisor_key: u64, pid: i32) -> Option<i32> {
    Processes::read().pids().find(|candidate| {
        let status = read_lossy(&format!("/proc/{candidate}/status")).unwrap_or_default();
        let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let innermost = numbers.and_then(|it| it.split_whitespace().last()?.parse::<i32>().ok());
        innermost == Some(pid) && key_of(*candidate) == Some(supervisor_key)
    })
}

/// Whether `/proc` shows any process of the namespace and user behind a supervisor's key.
pub fn is_populated(supervisor_key: u64) -> bool {
    Processes::read().pids().any(|pid| key_of(pid) == Some(supervisor_key))
}

/// Whether this is the PID namespace in which all processes are seen.
pub fn is_in_first_namespace() -> bool {
    /// `PROC_PID_INIT_INO` of the kernel: the same on every machine.
    const FIRST: u64 = 0xEFFF_FFFC;
    namespace_of("self") == Some(FIRST)
}

fn namespace_of(process: &str) -> Option<u64> {
    let namespace = fs::metadata(format!("/proc/{process}/ns/pid")).ok()?;
    Some(std::os::unix::fs::MetadataExt::ino(&namespace))
}

/// The key of the supervisor that a process of this or a lower namespace has.
fn key_of(pid: i32) -> Option<u64> {
    let user = fs::metadata(format!("/proc/{pid}")).ok()?;
    let user = std::os::unix::fs::MetadataExt::uid(&user);
    Some(supervisor_key_of(namespace_of(&pid.to_string())?, user))
}

fn supervisor_key_of(namespace: u64, user: u32) -> u64 {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&namespace.to_le_bytes());
    bytes[8..].copy_from_slice(&user.to_le_bytes());
    hash(&bytes)
}

/// Who this process is: what its supervisor must share to reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    pub pid: i32,
    pub start_time: u64,
    /// Inode of the PID namespace.
    pub namespace: u64,
    pub user: u32,
}

impl Identity {
    /// # Errors
    /// If `/proc` is missing or belongs to another PID namespace: process ids read there would
    /// mean other processes.
    pub fn of_self() -> Result<Self> {
        let remedy = "Mount it: `mount -t proc proc /proc`, or start the namespace with \
                      `unshare --pid --fork --mount-proc`";
        let proc = std::path::Path::new("/proc");
        let stat = Stat::of_self()
            .ok_or_else(|| Error::segment(proc, "/proc/self/stat cannot be read", remedy))?;
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        if stat.pid != pid {
            let problem = format!(
                "it shows another PID namespace (this process is {pid} here and {} there)",
                stat.pid
            );
            return Err(Error::segment(proc, problem, remedy));
        }
        let namespace = fs::metadata("/proc/self/ns/pid")
            .map_err(|error| Error::system("/proc/self/ns/pid", error))?;
        Ok(Self {
            pid,
            start_time: stat.start_time,
            namespace: std::os::unix::fs::MetadataExt::ino(&namespace),
            user: rustix::process::geteuid().as_raw(),
        })
    }

    /// A hash of what a supervisor is keyed by; never zero.
    pub fn supervisor_key(&self) -> u64 {
        supervisor_key_of(self.namespace, self.user)
    }
}

/// FNV-1a, 64 bits, never zero: the same in every version, unlike the standard library's.
pub fn hash(bytes: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in bytes {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_spaces_and_parentheses_are_parsed() {
        let tail = "T 7 1 1 0 -1 4194304 1 0 0 0 3 4 0 0 20 0 1 0 5155 1 1 1";
        for name in ["sh", "a b", "x) S 1 (y", ") Z 9", "(("] {
            let stat = Stat::parse(&format!("42 ({name}) {tail}")).unwrap();
            assert_eq!(
                stat,
                Stat {
                    pid: 42,
                    parent: 7,
                    state: b'T',
                    start_time: 5155,
                    cpu_ticks: 7,
                    threads: 1,
                    is_supervisor: false,
                }
            );
        }
        assert_eq!(Stat::parse("42 (sh"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn this_process_is_alive_and_has_ancestors() {
        let me = Identity::of_self().unwrap();
        assert!(is_alive(me.pid, me.start_time));
        assert!(!is_alive(me.pid, me.start_time + 1));
        assert!(open_exactly(me.pid, me.start_time + 1).is_none());
        assert!(ancestors(me.pid).count() >= 1);
    }

    #[test]
    fn a_tree_lists_ancestors_first_and_leaves_out_what_is_skipped() {
        let process = |(pid, parent)| Stat {
            pid,
            parent,
            state: b'S',
            start_time: 0,
            cpu_ticks: 0,
            threads: 1,
            is_supervisor: false,
        };
        let all: Processes =
            [(5, 3), (4, 2), (3, 1), (2, 1), (1, 0)].into_iter().map(process).collect();
        let pids = |stats: Vec<Stat>| stats.iter().map(|it| it.pid).collect::<Vec<_>>();
        assert_eq!(pids(all.tree(&[1], |_| false)), [1, 3, 2, 5, 4]);
        assert_eq!(pids(all.tree(&[1], |pid| pid == 3)), [1, 2, 4]);
        assert_eq!(pids(all.tree(&[3, 7], |_| false)), [3, 5]);
    }
}
