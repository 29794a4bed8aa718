//! A tenant in a supervisor's charge: its freezer, and what it is in the middle of.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use krex_core::cgroup::{self, Group};
use krex_core::clock;
use krex_core::freezer::{Cgroup2, Freezer, Journal, Kind, Members, ProcessTable, Sigstop};
use krex_core::hooks;
use krex_core::layout::{DEVICES, Layout, Tenant};
use krex_core::process;
use krex_core::region::FREEZE_LIMIT;
use krex_core::tenant;
use krex_core::word::{Frozen, IsolationWord, Obstacle, OwnerWord};
use rustix::process::Signal;

/// What is to be frozen of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    Whole,
    /// All but the ancestors of this process, the holder.
    Around {
        holder: i32,
    },
}

/// How far the freezing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    Running,
    Freezing { extent: Extent, since: u64 },
    Frozen { extent: Extent },
}

/// Why freezing failed for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure(pub Obstacle);

/// What knows its processes, and freezes them.
enum Means<'a> {
    Group(Group, Cgroup2),
    Tree(Sigstop<'a>),
}

pub struct Charge<'a> {
    segment: &'a Layout,
    slot: usize,
    pub owner: OwnerWord,
    pub start_time: u64,
    /// Fires when the root process ends; `None`: it had ended before, or no descriptor was left.
    pub pidfd: Option<OwnedFd>,
    pub root_ended: bool,
    means: Means<'a>,
    around: Option<Sigstop<'a>>,
    journal: Journal<'a>,
    pub progress: Progress,
    /// The tenure, per device, in which something was seen in flight.
    pub was_in_flight: [u64; DEVICES],
    /// When its root process was seen to have ended, and when what it left was last looked for.
    pub ended_at: Option<u64>,
    pub looked_at: u64,
    /// The fingerprint of the reservations that it was last kept off; zero: of none.
    pub kept_off: u64,
    /// Which isolation is being settled, since when, and when it is looked at again.
    pub settling: (IsolationWord, u64, u64),
    /// When it was told to end.
    pub terminated_at: Option<u64>,
    killed: bool,
}

impl<'a> Charge<'a> {
    pub fn new(segment: &'a Layout, supervisor: usize, slot: usize, owner: OwnerWord) -> Self {
        let tenant = &segment.tenants[slot];
        let start_time = tenant.start_time.load(Ordering::Acquire);
        let journal = Journal { segment, supervisor, tenant: slot };
        let kind = Kind::from_word(tenant.freezer.load(Ordering::Acquire));
        let group = (kind == Kind::Cgroup2).then(|| Group::at(&tenant.cgroup.get())).flatten();
        let opened = group.and_then(|group| match Cgroup2::open(&group) {
            Ok(freezer) => Some(Means::Group(group, freezer)),
            Err(error) => {
                log::warn!("{}: {error}; SIGSTOP is used", group.directory.display());
                None
            }
        });
        let tree = || Members { root: owner.pid(), start_time, group: None };
        let means = opened.unwrap_or_else(|| Means::Tree(Sigstop::new(tree(), journal)));
        let pidfd = process::open_exactly(owner.pid(), start_time);
        Self {
            segment,
            slot,
            owner,
            start_time,
            // Without a pidfd (no descriptor is left, say) it is asked for by its start time.
            root_ended: pidfd.is_none() && !process::is_alive(owner.pid(), start_time),
            pidfd,
            means,
            around: None,
            journal,
            progress: Progress::Running,
            was_in_flight: [0; DEVICES],
            ended_at: None,
            looked_at: 0,
            kept_off: 0,
            settling: (IsolationWord::NONE, 0, 0),
            terminated_at: None,
            killed: false,
        }
    }

    pub fn tenant(&self) -> &'a Tenant {
        &self.segment.tenants[self.slot]
    }

    /// How a freeze of this extent is named in acknowledgements.
    pub fn frozen_name(&self, extent: Extent) -> Frozen {
        match (extent, &self.means) {
            (Extent::Around { .. }, _) => Frozen::AroundHolder,
            (Extent::Whole, Means::Group(..)) => Frozen::Cgroup2,
            (Extent::Whole, Means::Tree(_)) => Frozen::Sigstop,
        }
    }

    fn freezer(&mut self, extent: Extent) -> Option<&mut (dyn Freezer + 'a)> {
        match extent {
            Extent::Whole => match &mut self.means {
                Means::Group(_, freezer) => Some(freezer),
                Means::Tree(freezer) => Some(freezer),
            },
            Extent::Around { .. } => match &mut self.around {
                Some(around) => Some(around),
                None => None,
            },
        }
    }

    /// Begins to freeze. One that is frozen to another extent is thawed first.
    pub fn start(&mut self, extent: Extent, processes: &mut ProcessTable) -> Result<(), Failure> {
        self.thaw();
        if self.progress != Progress::Running {
            return Ok(()); // The thaw failed and is tried again.
        }
        if hooks::sabotaged("freeze") {
            self.progress = Progress::Frozen { extent };
            return Ok(());
        }
        if let Extent::Around { holder } = extent {
            let members = Members {
                root: self.owner.pid(),
                start_time: self.start_time,
                group: match &self.means {
                    Means::Group(group, _) => Some(Group { directory: group.directory.clone() }),
                    Means::Tree(_) => None,
                },
            };
            let mut around = Sigstop::new(members, self.journal);
            let mut foreign = tenant::other_roots(self.segment, self.slot);
            foreign.push(holder);
            if let Means::Tree(tree) = &self.means {
                around.remember(tree);
            }
            around.exclude(foreign, process::ancestors(holder).map(|it| it.pid).collect());
            self.around = Some(around);
        }
        self.exclude_other_tenants();
        let now = clock::now();
        self.progress = Progress::Freezing { extent, since: now };
        self.tenant().frozen_since.store(now, Ordering::Release);
        let Some(freezer) = self.freezer(extent) else {
            self.thaw();
            return Err(Failure(Obstacle::FreezeFailed));
        };
        let started = freezer.start(processes);
        hooks::fault("freezing");
        started.map_err(|error| self.give_up(&error))
    }

    /// A tree is told apart from other tenants' that hang in it; they come and go.
    fn exclude_other_tenants(&mut self) {
        if let Means::Tree(tree) = &mut self.means {
            tree.exclude(tenant::other_roots(self.segment, self.slot), Vec::new());
        }
    }

    /// Carries a begun freeze on.
    pub fn carry_on(&mut self, processes: &mut ProcessTable) -> Result<(), Failure> {
        let Progress::Freezing { extent, since } = self.progress else {
            return Ok(());
        };
        let Some(freezer) = self.freezer(extent) else {
            return Ok(());
        };
        match freezer.is_frozen(processes) {
            Ok(true) => {
                self.progress = Progress::Frozen { extent };
                Ok(())
            }
            Ok(false) if clock::now() > since + clock::nanoseconds(FREEZE_LIMIT) => {
                self.thaw();
                Err(Failure(Obstacle::FreezeTimedOut))
            }
            Ok(false) => Ok(()),
            Err(error) => Err(self.give_up(&error)),
        }
    }

    fn give_up(&mut self, error: &io::Error) -> Failure {
        log::warn!("freezing {:?}: {error}", self.tenant().name.get());
        self.thaw();
        Failure(match error.raw_os_error() {
            Some(libc::EINVAL) => Obstacle::IsInit,
            Some(libc::EPERM | libc::EACCES) => Obstacle::NotPermitted,
            _ => Obstacle::FreezeFailed,
        })
    }

    /// Whether what was frozen is so still.
    pub fn is_still_frozen(&mut self, processes: &mut ProcessTable) -> bool {
        let Progress::Frozen { extent } = self.progress else {
            return false;
        };
        if hooks::sabotaged("freeze") || hooks::sabotaged("verify") {
            return true;
        }
        self.freezer(extent).is_some_and(|it| it.is_still_frozen(processes).unwrap_or(false))
    }

    /// Lets it run. If the kernel refuses, the progress stays as it was and the next round tries
    /// again.
    pub fn thaw(&mut self) {
        let extent = match self.progress {
            Progress::Running => return,
            Progress::Freezing { extent, .. } | Progress::Frozen { extent } => extent,
        };
        if hooks::sabotaged("thaw") {
            return;
        }
        hooks::fault("thawing");
        if let Some(freezer) = self.freezer(extent)
            && let Err(error) = freezer.thaw()
        {
            log::error!("thawing {:?}: {error}", self.tenant().name.get());
            return;
        }
        hooks::fault("thawed");
        self.progress = Progress::Running;
        let since = self.tenant().frozen_since.swap(0, Ordering::AcqRel);
        if since != 0 {
            let frozen = clock::now().saturating_sub(since);
            self.tenant().frozen_total.fetch_add(frozen, Ordering::AcqRel);
        }
    }

    /// Whether a process that belongs to it is in its group, or below: there is nothing to know
    /// of one without a group. What has moved out is not frozen with the group.
    fn knows(&self, pid: i32) -> bool {
        let Means::Group(..) = &self.means else { return true };
        let own = self.tenant().cgroup.get();
        cgroup::path_of(&pid.to_string()).is_none_or(|path| {
            path.strip_prefix(&own).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }

    /// Goes over to SIGSTOP if a process has moved out of the group (into a container's or a
    /// scope's, say). Looked for once a second, and of the root at each region.
    pub fn follow(&mut self, processes: &mut ProcessTable) {
        let Means::Group(group, _) = &self.means else { return };
        let inside = group.processes();
        let foreign = tenant::other_roots(self.segment, self.slot);
        let tree = processes.get().tree(&[self.owner.pid()], |pid| foreign.contains(&pid));
        let has_left = |it: &process::Stat| {
            !it.has_ended() && !it.is_supervisor && !inside.contains(&it.pid) && !self.knows(it.pid)
        };
        if !tree.iter().any(has_left) {
            return;
        }
        log::warn!("{:?} left its cgroup: SIGSTOP is used from now on", self.tenant().name.get());
        self.thaw();
        if self.progress == Progress::Running {
            let members =
                Members { root: self.owner.pid(), start_time: self.start_time, group: None };
            self.means = Means::Tree(Sigstop::new(members, self.journal));
            self.tenant().freezer.store(Kind::Sigstop as u64, Ordering::Release);
        }
    }

    /// Whether any process of it is left; learns who belongs to it on the way.
    pub fn is_populated(&mut self, processes: &mut ProcessTable) -> bool {
        self.exclude_other_tenants();
        match &mut self.means {
            Means::Group(group, _) => group.is_populated() || !self.root_ended,
            Means::Tree(tree) => tree.look(processes),
        }
    }

    /// Processes of it that were seen, and may not be found any more by those above them.
    pub fn seen(&self) -> Vec<i32> {
        match &self.means {
            Means::Group(..) => Vec::new(),
            Means::Tree(tree) => {
                let is_there = |it: &&(i32, u64)| process::is_alive(it.0, it.1);
                tree.seen().iter().filter(is_there).map(|it| it.0).collect()
            }
        }
    }

    /// CPU time used so far, in nanoseconds. What ended meanwhile may be missing in it.
    pub fn cpu_time(&mut self, processes: &mut ProcessTable) -> u64 {
        match &mut self.means {
            Means::Group(group, _) => group.cpu_time().unwrap_or(0) * 1000,
            Means::Tree(tree) => {
                let ticks = tree.cpu_ticks(processes);
                ticks * (clock::SECOND / rustix::param::clock_ticks_per_second().max(1))
            }
        }
    }

    /// The part of it that is quickly had: of a tree, the root's. `None` if there is no other.
    pub fn quick_cpu_time(&self) -> Option<u64> {
        match &self.means {
            Means::Group(..) => None,
            Means::Tree(_) => {
                Some(process::Stat::of(self.owner.pid()).map_or(0, |it| it.cpu_ticks))
            }
        }
    }

    /// Ends it, at its time limit, say: first politely, then, `killing`, for good.
    pub fn end(&mut self, killing: bool, processes: &mut ProcessTable) {
        if killing && self.killed {
            return;
        }
        self.killed = killing;
        let signal = if killing { Signal::KILL } else { Signal::TERM };
        log::info!("ending {:?}: {signal:?}", self.tenant().name.get());
        let members: Vec<(i32, u64)> = match &mut self.means {
            Means::Group(group, _) if killing && group.kill().is_ok() => return,
            Means::Group(group, _) => group
                .processes()
                .iter()
                .filter_map(|pid| process::Stat::of(*pid))
                .map(|it| (it.pid, it.start_time))
                .collect(),
            Means::Tree(tree) => {
                tree.look(processes);
                tree.seen().to_vec()
            }
        };
        for (pid, start_time) in members {
            let _ = process::signal_exactly(pid, start_time, signal);
        }
    }
}
