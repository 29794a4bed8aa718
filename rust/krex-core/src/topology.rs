//! The machine's cores, as `/sys` tells of them.

use std::fs;
use std::path::Path;

use crate::affinity::CpuSet;

/// A physical core: the hyperthreads of it that are online, and its NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Core {
    pub node: usize,
    pub cpus: CpuSet,
}

/// Where the kernel shows its processors.
pub const SYSTEM: &str = "/sys/devices/system";

/// The CPUs that are online; `None` if `/sys` does not tell.
pub fn online(system: &Path) -> Option<CpuSet> {
    let list = fs::read_to_string(system.join("cpu/online")).ok()?;
    CpuSet::parse(list.trim()).ok().filter(|cpus| !cpus.is_empty())
}

/// All cores, in the order of their first CPUs. What `/sys` does not show counts as a core with
/// one thread on node 0.
pub fn cores(system: &Path) -> Vec<Core> {
    let online = online(system).unwrap_or_default();
    let nodes = nodes(system);
    let mut cores = Vec::new();
    let mut seen = CpuSet::default();
    for cpu in online.iter() {
        if seen.contains(cpu) {
            continue;
        }
        let path = system.join(format!("cpu/cpu{cpu}/topology/thread_siblings_list"));
        let list = fs::read_to_string(path).unwrap_or_default();
        let mut cpus = CpuSet::parse(list.trim()).unwrap_or_default().intersection(&online);
        cpus.insert(cpu);
        seen = seen.union(&cpus);
        let node = nodes.iter().find(|(_, of_node)| of_node.contains(cpu)).map_or(0, |it| it.0);
        cores.push(Core { node, cpus });
    }
    cores
}

fn nodes(system: &Path) -> Vec<(usize, CpuSet)> {
    let entries = fs::read_dir(system.join("node")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()?;
            let list = fs::read_to_string(entry.path().join("cpulist")).ok()?;
            Some((number, CpuSet::parse(list.trim()).ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_read_with_hyperthreads_nodes_and_offline_cpus() {
        let root = std::env::temp_dir().join(format!("krex-topology-{}", std::process::id()));
        let write = |path: &str, text: &str| {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        // Two sockets of two cores with two threads each; CPU 6, a thread of core 2, is offline.
        write("cpu/online", "0-5,7\n");
        for (cpu, siblings) in [(0, "0,4"), (1, "1,5"), (2, "2"), (3, "3,7")] {
            write(&format!("cpu/cpu{cpu}/topology/thread_siblings_list"), siblings);
        }
        write("node/node0/cpulist", "0-1,4-5\n");
        write("node/node1/cpulist", "2-3,6-7\n");
        let found: Vec<(usize, String)> =
            cores(&root).into_iter().map(|it| (it.node, it.cpus.to_string())).collect();
        fs::remove_dir_all(&root).unwrap();
        let expected = [(0, "0,4"), (0, "1,5"), (1, "2"), (1, "3,7")];
        assert_eq!(found, expected.map(|(node, cpus)| (node, cpus.to_owned())));
        assert_eq!(cores(&root), [], "nothing is shown");
    }

    #[test]
    fn this_machine_has_cores() {
        let all = cores(Path::new(SYSTEM));
        let cpus = all.iter().fold(CpuSet::default(), |all, core| all.union(&core.cpus));
        assert_eq!(Some(cpus), online(Path::new(SYSTEM)));
    }
}
