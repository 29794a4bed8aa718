//! Processes on a GPU that are no tenants.
//!
//! NVIDIA's management library lists the processes that have a context on a GPU. Those that krex
//! does not know are excluded by nobody, and can disturb every region.
//!
//! In the first PID namespace every process can be looked at. Below it, the library may number
//! processes as that namespace does, or as the host does. If this process is on the list under its
//! own number, the former is so. Otherwise there is nothing but their count to go by.

use std::collections::HashSet;

use crate::cgroup;
use crate::client::Client;
use crate::layout::Layout;
use crate::process;
use crate::report::Verdict;
use crate::word::SlotState;

/// What a process of NVIDIA's own is called that is on the list for all clients of MPS (as the
/// kernel shortens it): its clients are on the list themselves.
const MPS_SERVER: &str = "nvidia-cuda-mps";

/// What the list of processes says about a region: nothing, or a reason.
pub fn judge(client: &Client, device: usize, pids: &[i32]) -> Option<(Verdict, String)> {
    let segment = &client.segment;
    let pids: HashSet<i32> = pids.iter().copied().collect();
    let numbers_match = process::is_in_first_namespace() || pids.contains(&client.identity.pid);
    if !numbers_match {
        let known = submitters(segment, device).count();
        return (pids.len() > known).then(|| {
            let text = format!(
                "NVML lists {} processes on the GPU, and krex knows of {known}; which ones they \
                 are cannot be told from within this PID namespace",
                pids.len()
            );
            (Verdict::Unknown, text)
        });
    }
    let mut strangers: Vec<i32> =
        pids.into_iter().filter(|pid| !is_known(client, device, *pid)).collect();
    strangers.sort_unstable();
    let described: Vec<String> = strangers.into_iter().filter_map(describe).collect();
    (!described.is_empty()).then(|| {
        let text = format!(
            "{} on the GPU, which krex does not know: start everything that shares it with \
             `krex run`",
            match &described[..] {
                [one] => format!("process {one} was"),
                several => format!("processes {} were", several.join(", ")),
            }
        );
        (Verdict::Foreign, text)
    })
}

/// The submitters on a device that may have a context.
fn submitters(segment: &Layout, device: usize) -> impl Iterator<Item = usize> + '_ {
    segment.live_submitters.iter().filter(move |slot| {
        let submitter = &segment.submitters[*slot];
        submitter.owner().state() == SlotState::Live
            && submitter.device.load(std::sync::atomic::Ordering::Relaxed) == device as u64
    })
}

/// Whether a process belongs to a tenant, in this PID namespace or in one below.
fn is_known(client: &Client, device: usize, pid: i32) -> bool {
    let segment = &client.segment;
    if pid == client.identity.pid {
        return true;
    }
    let mut elsewhere = Vec::new();
    for slot in submitters(segment, device) {
        let owner = segment.submitters[slot].owner();
        if owner.supervisor() != client.supervisor {
            elsewhere.push(owner);
        } else if owner.pid() == pid {
            return true;
        }
    }
    let path = cgroup::path_of(&pid.to_string()).unwrap_or_default();
    if let Some(group) = cgroup::tenants_group(&path)
        && segment
            .live_tenants
            .iter()
            .any(|it| segment.tenants[it].cgroup.bytes() == group.as_bytes())
    {
        return true;
    }
    let line: HashSet<i32> =
        std::iter::once(pid).chain(process::ancestors(pid).map(|it| it.pid)).collect();
    let is_root = |slot: usize| {
        let owner = segment.tenants[slot].owner();
        owner.supervisor() == client.supervisor && line.contains(&owner.pid())
    };
    if segment.live_tenants.iter().any(is_root) {
        return true;
    }
    let roots = segment.live_tenants.iter().map(|it| segment.tenants[it].owner());
    elsewhere.extend(roots.filter(|it| it.supervisor() != client.supervisor));
    elsewhere.into_iter().any(|owner| {
        let key = &segment.supervisors[owner.supervisor()].key;
        process::find_foreign(key.load(std::sync::atomic::Ordering::Acquire), owner.pid())
            .is_some_and(|it| line.contains(&it))
    })
}

/// A process as users know it. `None`: it has ended meanwhile, or is not anybody's.
fn describe(pid: i32) -> Option<String> {
    let name = std::fs::read(format!("/proc/{pid}/comm")).ok()?;
    let name = String::from_utf8_lossy(&name).trim().to_owned();
    let has_ended = process::Stat::of(pid).is_none_or(process::Stat::has_ended);
    (!has_ended && name != MPS_SERVER).then(|| format!("{pid} ({name})"))
}
