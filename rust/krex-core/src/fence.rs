//! A fence around reserved CPUs: where a tenant's cgroup has a cpuset, the kernel itself keeps the
//! tenant inside, whatever masks its threads give themselves.
//!
//! It comes on top of the masks (`keep_off.rs`), and has none of its own: raising or lowering it
//! changes no mask that had done without the reserved CPUs before. That holds since Linux
//! remembers which mask a thread asked for; older kernels set all threads back to the whole
//! cpuset, so there it is not used.
//!
//! A supervisor raises it and says so first; a holder that finds it so lowers its own before it
//! moves. Either the holder's look comes after the supervisor's word, or the supervisor's look at
//! the gate comes after the gate was closed, and then the supervisor lowers it again.

use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crate::affinity::CpuSet;
use crate::cgroup::Group;
use crate::keep_off::is_in_region;
use crate::layout::{Layout, Tenant};

/// The first version that is taken to remember masks through changes of a cpuset.
const SINCE: (u32, u32) = (6, 6);

/// Whether the tenant can be fenced.
pub fn is_available(tenant: &Tenant) -> bool {
    control(tenant).is_some()
}

fn control(tenant: &Tenant) -> Option<PathBuf> {
    if tenant.cgroup.is_empty() || !kernel_remembers() {
        return None;
    }
    let control = Group::known(&tenant.cgroup.get())?.directory.join("cpuset.cpus");
    control.exists().then_some(control)
}

fn kernel_remembers() -> bool {
    static REMEMBERS: OnceLock<bool> = OnceLock::new();
    *REMEMBERS.get_or_init(|| {
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        is_new_enough(&release)
    })
}

fn is_new_enough(release: &str) -> bool {
    let mut numbers = release.split(|it: char| !it.is_ascii_digit()).map(str::parse::<u32>);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
        return false;
    };
    (major, minor) >= SINCE
}

/// Fences a tenant off the CPUs in `off`, whose threads all do without them by now. For its
/// supervisor; where it cannot be done the masks have to do.
pub fn raise(segment: &Layout, slot: usize, off: &CpuSet) {
    let tenant = &segment.tenants[slot];
    let Some(control) = control(tenant) else { return };
    let read = |path: PathBuf| CpuSet::parse(fs::read_to_string(path).ok()?.trim()).ok();
    let above = control.parent().and_then(|group| group.parent());
    let Some(allowed) = above.and_then(|it| read(it.join("cpuset.cpus.effective"))) else {
        return;
    };
    let inside = allowed.without(off);
    if inside.is_empty() || inside == allowed || read(control.clone()) == Some(inside) {
        return;
    }
    // SeqCst: see the module's text.
    tenant.fenced.store(1, Ordering::SeqCst);
    if let Err(error) = fs::write(&control, inside.to_string()) {
        log::debug!("{}: {error}", control.display());
        tenant.fenced.store(0, Ordering::SeqCst);
    }
    if is_in_region(segment, slot) {
        lower(tenant);
    }
}

/// Takes the fence of a tenant away, if there is one.
pub fn lower(tenant: &Tenant) {
    // SeqCst: see the module's text.
    if tenant.fenced.load(Ordering::SeqCst) == 0 {
        return;
    }
    if let Some(control) = control(tenant)
        && let Err(error) = fs::write(&control, "\n")
    {
        log::warn!("{}: {error}", control.display());
        return;
    }
    tenant.fenced.store(0, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_the_kernel_are_compared() {
        for (release, new) in [
            ("6.18.44-fc-v595\n", true),
            ("6.6.0", true),
            ("7.0-rc1", true),
            ("6.5.13", false),
            ("5.15.0-generic", false),
            ("6", false),
            ("", false),
        ] {
            assert_eq!(is_new_enough(release), new, "{release:?}");
        }
    }
}
