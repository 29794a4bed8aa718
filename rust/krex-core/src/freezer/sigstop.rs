//! Freezing by SIGSTOP: for containers whose cgroups are read-only.
//!
//! Parents are stopped before their children and continued after them, so that none sees its
//! child stopped. Only what krex stopped is continued: each process is written into the journal
//! in shared memory *before* its signal is sent, so that whoever takes over from a supervisor
//! that died knows it. A process that detached from its parents between two looks is not found.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::Signal;

use super::{Freezer, ProcessTable, emergency};
use crate::cgroup::Group;
use crate::layout::{Layout, STOPPED};
use crate::process::{self, Processes, Stat};
use crate::word::{OwnerWord, SlotState};

/// The journal of stopped processes: one fixed table for all supervisors.
#[derive(Clone, Copy)]
pub struct Journal<'a> {
    pub segment: &'a Layout,
    /// The slot of the supervisor that writes.
    pub supervisor: usize,
    /// The slot of the tenant.
    pub tenant: usize,
}

impl Journal<'_> {
    /// Notes a process that is about to be stopped; returns its place.
    fn note(&self, process: &Stat) -> io::Result<usize> {
        let owner =
            OwnerWord::new(self.tenant as u64, process.pid, self.supervisor, SlotState::Live);
        for (place, entry) in self.segment.stopped.iter().enumerate() {
            self.segment.stopped_mark.raise(place);
            // The start time is written first: whoever sees the entry live sees its start time.
            // Only supervisors write here, and each entry is claimed by Starting beforehand.
            let free = entry.owner.load(Ordering::Acquire);
            if !OwnerWord(free).is_free() {
                continue;
            }
            let starting = owner.with_state(SlotState::Starting);
            if swap(&entry.owner, free, starting.0) {
                entry.start_time.store(process.start_time, Ordering::Relaxed);
                // Release: partner of the Acquire in `continue_all`.
                entry.owner.store(owner.0, Ordering::Release);
                return Ok(place);
            }
        }
        Err(io::Error::other("the journal of stopped processes is full"))
    }

    fn erase(&self, place: usize) {
        self.segment.stopped[place].owner.store(0, Ordering::Release);
    }
}

fn swap(word: &AtomicU64, from: u64, to: u64) -> bool {
    word.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

/// Continues everything that the journal holds for `supervisor`; for whoever takes over.
pub fn continue_all(segment: &Layout, supervisor: usize) -> usize {
    let mut continued = 0;
    let used = segment.stopped_mark.used(STOPPED);
    for entry in segment.stopped[..used].iter().rev() {
        let owner = OwnerWord(entry.owner.load(Ordering::Acquire));
        if owner.is_free() || owner.supervisor() != supervisor {
            continue;
        }
        // An entry in state Starting was noted by one that died before it sent the signal.
        if owner.state() == SlotState::Live {
            let start_time = entry.start_time.load(Ordering::Relaxed);
            if process::signal_exactly(owner.pid(), start_time, Signal::CONT).is_ok() {
                continued += 1;
            }
        }
        entry.owner.store(0, Ordering::Release);
    }
    continued
}

/// Whom to stop.
pub struct Members {
    pub root: i32,
    pub start_time: u64,
    /// The group that knows them all. Without one: the root, all below it, and all that was once
    /// seen below it; but not what belongs to other tenants.
    pub group: Option<Group>,
}

/// Stops a tenant's processes one by one.
pub struct Sigstop<'a> {
    members: Members,
    journal: Journal<'a>,
    /// Roots of other tenants: neither they nor what is below them belongs to this one.
    foreign: Vec<i32>,
    /// The holder's ancestors: they run on, but what else is below them is stopped.
    spared: Vec<i32>,
    /// Processes seen earlier, so that one whose parent ended is still known.
    seen: Vec<(i32, u64)>,
    /// What was stopped, in this order, with its place in the journal.
    stopped: Vec<(i32, u64, usize)>,
    /// All of them were seen stopped, with all their threads.
    all_stopped: bool,
}

impl<'a> Sigstop<'a> {
    pub fn new(members: Members, journal: Journal<'a>) -> Self {
        Self {
            members,
            journal,
            foreign: Vec::new(),
            spared: Vec::new(),
            seen: Vec::new(),
            stopped: Vec::new(),
            all_stopped: false,
        }
    }

    /// Leaves out the `foreign` processes and all below them, and the `spared` ones alone.
    pub fn exclude(&mut self, foreign: Vec<i32>, spared: Vec<i32>) {
        self.foreign = foreign;
        self.spared = spared;
    }

    /// Takes over what another one has seen of the same tenant.
    pub fn remember(&mut self, other: &Self) {
        self.seen.clone_from(&other.seen);
    }

    /// Process ids and start times of those seen last.
    pub fn seen(&self) -> &[(i32, u64)] {
        &self.seen
    }

    /// Remembers who belongs to the tenant now. Returns whether anybody is left.
    pub fn look(&mut self, processes: &mut ProcessTable) -> bool {
        let members = self.list(processes.get());
        self.seen = members.iter().map(|it| (it.pid, it.start_time)).collect();
        !members.is_empty()
    }

    /// CPU time used by the members that are left, in clock ticks.
    pub fn cpu_ticks(&mut self, processes: &mut ProcessTable) -> u64 {
        self.list(processes.get()).iter().map(|it| it.cpu_ticks).sum()
    }

    fn list(&self, processes: &Processes) -> Vec<Stat> {
        let root = self.members.root;
        let is_root = |it: &Stat| it.start_time == self.members.start_time;
        let found = match &self.members.group {
            Some(group) => group.processes().iter().filter_map(|pid| Stat::of(*pid)).collect(),
            None => {
                // Those that lost their way to the root are found as long as they are known.
                let lost = self.seen.iter().filter(|(pid, start_time)| {
                    processes.get(*pid).is_some_and(|it| it.start_time == *start_time)
                });
                let own = processes.get(root).filter(|it| is_root(it)).map(|it| it.pid);
                let starts: Vec<i32> = own.into_iter().chain(lost.map(|it| it.0)).collect();
                processes.tree(&starts, |pid| self.foreign.contains(&pid))
            }
        };
        let counts = |it: &Stat| {
            !it.has_ended()
                && !it.is_supervisor
                && !self.spared.contains(&it.pid)
                && !self.is_foreign(it.pid, processes)
        };
        found.into_iter().filter(counts).collect()
    }

    /// Whether the nearest tenant's root above a process, or itself, is another tenant's.
    fn is_foreign(&self, pid: i32, processes: &Processes) -> bool {
        let mut next = pid;
        for _ in 0..1 << 12 {
            if next == self.members.root {
                return false;
            }
            if self.foreign.contains(&next) {
                return true;
            }
            match processes.get(next) {
                Some(process) => next = process.parent,
                None => return false,
            }
        }
        false
    }

    /// Stops those members that run and were not stopped by others before.
    fn stop_new(&mut self, members: &[Stat]) -> io::Result<()> {
        for member in members {
            let key = (member.pid, member.start_time);
            if self.stopped.iter().any(|it| (it.0, it.1) == key) || member.is_stopped() {
                continue;
            }
            if member.pid == 1 {
                // The kernel ignores it: init cannot be stopped from inside its namespace.
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
            let place = self.journal.note(member)?;
            emergency::note_process(member.pid);
            match process::signal_exactly(member.pid, member.start_time, Signal::STOP) {
                Ok(()) => self.stopped.push((member.pid, member.start_time, place)),
                Err(error) => {
                    emergency::erase_process(member.pid);
                    self.journal.erase(place);
                    if error.raw_os_error() != Some(libc::ESRCH) {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whether every thread of the process is stopped; one that has gone is.
fn all_threads_stopped(pid: i32) -> bool {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return true;
    };
    threads.flatten().all(|thread| {
        let path = thread.path().join("stat");
        let Ok(line) = std::fs::read(path) else {
            return true;
        };
        Stat::parse(&String::from_utf8_lossy(&line))
            .is_none_or(|stat| stat.is_stopped() || stat.has_ended())
    })
}

impl Freezer for Sigstop<'_> {
    fn start(&mut self, processes: &mut ProcessTable) -> io::Result<()> {
        let members = self.list(processes.get());
        self.seen = members.iter().map(|it| (it.pid, it.start_time)).collect();
        self.all_stopped = false;
        self.stop_new(&members)
    }

    fn is_frozen(&mut self, processes: &mut ProcessTable) -> io::Result<bool> {
        if !self.all_stopped {
            // Those that are known first: going through all processes takes much longer. And not
            // in this round: its table may be older than the last one's stop.
            self.all_stopped = self.stopped.iter().all(|it| all_threads_stopped(it.0));
            return Ok(false);
        }
        let members = self.list(processes.get());
        self.seen = members.iter().map(|it| (it.pid, it.start_time)).collect();
        let before = self.stopped.len();
        self.stop_new(&members)?;
        // Whoever is stopped only now, because it was born meanwhile, may have had a child
        // meanwhile: frozen is a tree in which a whole look found nobody to stop.
        self.all_stopped = self.stopped.len() == before;
        Ok(self.all_stopped && members.iter().all(|it| it.is_stopped()))
    }

    fn is_still_frozen(&mut self, processes: &mut ProcessTable) -> io::Result<bool> {
        // SIGCONT resumes all threads, so the process's own state is enough.
        Ok(self.list(processes.get()).iter().all(|it| it.is_stopped()))
    }

    fn thaw(&mut self) -> io::Result<()> {
        while let Some((pid, start_time, place)) = self.stopped.pop() {
            match process::signal_exactly(pid, start_time, Signal::CONT) {
                Err(error) if error.raw_os_error() != Some(libc::ESRCH) => {
                    self.stopped.push((pid, start_time, place));
                    return Err(error);
                }
                _ => {
                    emergency::erase_process(pid);
                    self.journal.erase(place);
                }
            }
        }
        Ok(())
    }
}
