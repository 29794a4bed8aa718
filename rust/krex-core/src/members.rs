//! The processes and threads of a tenant, for whoever looks at their masks.

use std::fs;
use std::sync::atomic::Ordering;

use crate::cgroup::Group;
use crate::freezer::{Kind, ProcessTable};
use crate::layout::Layout;
use crate::process;
use crate::tenant;

/// A process and its threads, as its own PID namespace numbers them.
#[derive(Debug)]
pub struct Member {
    pub process: i32,
    pub threads: Vec<i32>,
}

impl Member {
    /// Without threads if it has gone.
    pub fn of(process: i32) -> Self {
        let entries = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse().ok();
        Self { process, threads: entries.filter_map(number).collect() }
    }
}

/// The processes of the tenant in `slot`. `all` is read only if need be.
pub fn of(segment: &Layout, slot: usize, all: &mut ProcessTable) -> Vec<Member> {
    let tenant = &segment.tenants[slot];
    let root = tenant.owner().pid();
    if Kind::from_word(tenant.freezer.load(Ordering::Acquire)) == Kind::Cgroup2 {
        let group = Group::known(&tenant.cgroup.get());
        let mut found = group.as_ref().map_or(Vec::new(), Group::processes);
        if let ([process], Some(group)) = (&found[..], group)
            && *process == root
        {
            // Of one process alone the group lists the threads, many times quicker than /proc.
            return vec![Member { process: root, threads: group.threads() }];
        }
        if !found.contains(&root) {
            found.push(root);
        }
        return found.into_iter().map(Member::of).collect();
    }
    if root == rustix::process::getpid().as_raw_nonzero().get() && process::is_childless() {
        return vec![Member::of(root)];
    }
    let foreign = tenant::other_roots(segment, slot);
    all.get()
        .tree(&[root], |pid| foreign.contains(&pid))
        .into_iter()
        .filter(|it| !it.has_ended() && !it.is_supervisor)
        .map(|it| Member::of(it.pid))
        .collect()
}

/// The same, with the processes of all tenants in this PID namespace that descend from it, but for
/// those whose threads are on reserved CPUs of their own.
pub fn family(segment: &Layout, slot: usize) -> Vec<Member> {
    let mut all = ProcessTable::default();
    family_slots(segment, slot).flat_map(|it| of(segment, it, &mut all)).collect()
}

/// The slots of those tenants.
pub fn family_slots(segment: &Layout, slot: usize) -> impl Iterator<Item = usize> + '_ {
    let supervisor = segment.tenants[slot].owner().supervisor();
    let is_below = move |other: &usize| {
        let tenant = &segment.tenants[*other];
        tenant.owner().supervisor() == supervisor
            && tenant::descends_from(segment, *other, slot)
            && !tenant.isolation().is_in_hand()
    };
    std::iter::once(slot).chain(segment.live_tenants.iter().filter(is_below))
}
