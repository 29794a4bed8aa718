//! The processes and threads of a tenant, for whoever looks at their masks.

use std::fs;

use crate::cgroup::Group;
use crate::freezer::Kind;
use crate::layout::Layout;
use crate::process::{self, Processes};
use crate::tenant;
use crate::word::Isolation;

use std::sync::atomic::Ordering;

/// The processes of the tenant in `slot`, as its own PID namespace numbers them.
pub fn processes(segment: &Layout, slot: usize) -> Vec<i32> {
    let tenant = &segment.tenants[slot];
    let root = tenant.owner().pid();
    if Kind::from_word(tenant.freezer.load(Ordering::Acquire)) == Kind::Cgroup2 {
        let mut found = Group::known(&tenant.cgroup.get()).map_or(Vec::new(), |it| it.processes());
        if !found.contains(&root) {
            found.push(root);
        }
        return found;
    }
    if root == rustix::process::getpid().as_raw_nonzero().get() && process::is_childless() {
        return vec![root];
    }
    let foreign = tenant::other_roots(segment, slot);
    Processes::read()
        .tree(&[root], |pid| foreign.contains(&pid))
        .into_iter()
        .filter(|it| !it.has_ended() && !it.is_supervisor)
        .map(|it| it.pid)
        .collect()
}

/// The same, with the processes of all tenants in this PID namespace that descend from it, but for
/// those whose threads are on reserved CPUs of their own.
pub fn family(segment: &Layout, slot: usize) -> Vec<i32> {
    let supervisor = segment.tenants[slot].owner().supervisor();
    let mut all = processes(segment, slot);
    for other in segment.live_tenants.iter() {
        let tenant = &segment.tenants[other];
        if tenant.owner().supervisor() == supervisor
            && tenant::descends_from(segment, other, slot)
            && tenant.isolation().stage() == Isolation::None
        {
            all.extend(processes(segment, other));
        }
    }
    all
}

/// The threads of a process; none if it has gone.
pub fn threads(process: i32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/task")) else {
        return Vec::new();
    };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}
