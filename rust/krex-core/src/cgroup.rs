//! Cgroups of version 2: where they are mounted, and the groups that krex makes for tenants.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Names of krex's own groups begin with this.
pub const PREFIX: &str = "krex-";

/// A mount of cgroup v2, as this mount namespace shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    point: PathBuf,
    /// The group at the mount's root; anything above it is not visible here.
    root: String,
}

impl Mount {
    /// Finds it in the mount table: it may sit anywhere, also below a version 1 tree.
    pub fn find() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/self/mountinfo").ok()?)
    }

    fn parse(table: &str) -> Option<Self> {
        table.lines().find_map(|line| {
            let (before, after) = line.split_once(" - ")?;
            if after.split(' ').next()? != "cgroup2" {
                return None;
            }
            let mut fields = before.split(' ').skip(3);
            let root = unescape(fields.next()?);
            Some(Self { root, point: unescape(fields.next()?).into() })
        })
    }

    /// The directory of the group at `path`, if it lies below the mount's root.
    pub fn directory(&self, path: &str) -> Option<PathBuf> {
        let root = self.root.trim_end_matches('/');
        let below = path.strip_prefix(root)?;
        if !(below.is_empty() || below.starts_with('/')) || below.split('/').any(|it| it == "..") {
            return None;
        }
        Some(self.point.join(below.trim_start_matches('/')))
    }
}

/// `\040` for a space, and so on.
fn unescape(field: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = field.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let octal = (*first == b'\\').then(|| tail.get(..3)).flatten();
        let value = octal
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match value {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The path of a process's group (`"self"` or a process id), from the line `0::PATH`.
pub fn path_of(process: &str) -> Option<String> {
    let table = fs::read(format!("/proc/{process}/cgroup")).ok()?;
    let table = String::from_utf8_lossy(&table).into_owned();
    let path = table.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(path.trim_end_matches(" (deleted)").to_owned())
}

/// Whether this is the name of a tenant's group: `krex-HEX-SLOT-GENERATION`.
fn is_tenants_name(name: &str) -> bool {
    let mut parts = name.strip_prefix(PREFIX).unwrap_or_default().split('-');
    let hex = parts
        .next()
        .is_some_and(|it| it.len() >= 8 && it.bytes().all(|byte| byte.is_ascii_hexdigit()));
    let number = |part: Option<&str>| {
        part.is_some_and(|it| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit()))
    };
    hex && number(parts.next()) && number(parts.next()) && parts.next().is_none()
}

/// The tenant's group that a path is, or lies below: the outermost one.
pub fn tenants_group(path: &str) -> Option<&str> {
    let mut end = 0;
    for name in path.split('/') {
        end += name.len();
        if is_tenants_name(name) {
            return path.get(..end);
        }
        end += 1;
    }
    None
}

/// The group below which a new tenant of this process belongs: its own, so that limits and
/// kill-by-group keep working; but beside, not below, a tenant's, since freezing is hierarchical.
pub fn parent_for_tenants() -> Option<String> {
    let own = path_of("self")?;
    let Some(group) = tenants_group(&own) else {
        return Some(own);
    };
    let (parent, _) = group.rsplit_once('/')?;
    Some(if parent.is_empty() { "/".to_owned() } else { parent.to_owned() })
}

/// A group that krex made.
#[derive(Debug)]
pub struct Group {
    pub directory: PathBuf,
}

impl Group {
    /// The group at `path`; `None` if it is not one of krex's, or not visible here.
    pub fn at(path: &str) -> Option<Self> {
        if tenants_group(path) != Some(path) {
            return None;
        }
        Some(Self { directory: Mount::find()?.directory(path)? })
    }

    /// The same, with the mount where this process first found it: the mount table may be long.
    /// `None` also if the group is not to be seen there any more.
    pub fn known(path: &str) -> Option<Self> {
        static MOUNT: OnceLock<Option<Mount>> = OnceLock::new();
        if tenants_group(path) != Some(path) {
            return None;
        }
        let directory = MOUNT.get_or_init(Mount::find).as_ref()?.directory(path)?;
        directory.exists().then_some(Self { directory })
    }

    /// Makes the group. It must have `cgroup.freeze`.
    ///
    /// # Errors
    /// If there is no right to make groups there, or the kernel cannot freeze.
    pub fn make(path: &str) -> io::Result<Self> {
        let group = Self::at(path).ok_or(io::ErrorKind::NotFound)?;
        match fs::create_dir(&group.directory) {
            Ok(()) => {}
            // A group of the same name may be left over; not if anybody is in it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && !group.is_populated() => {
            }
            Err(error) => return Err(error),
        }
        if let Err(error) = fs::write(group.directory.join("cgroup.freeze"), "0") {
            group.remove();
            return Err(error);
        }
        Ok(group)
    }

    /// Moves a process here (0: the caller), with all its threads.
    ///
    /// # Errors
    /// If the process is gone, or may not be moved.
    pub fn take(&self, pid: i32) -> io::Result<()> {
        fs::write(self.directory.join("cgroup.procs"), pid.to_string())
    }

    /// The processes in the group and below it, as this PID namespace numbers them.
    pub fn processes(&self) -> Vec<i32> {
        let mut found = Vec::new();
        collect(&self.directory, "cgroup.procs", &mut found);
        found
    }

    /// The threads in the group and below it, likewise.
    pub fn threads(&self) -> Vec<i32> {
        let mut found = Vec::new();
        collect(&self.directory, "cgroup.threads", &mut found);
        found
    }

    /// Whether any process is left, exits in progress included.
    pub fn is_populated(&self) -> bool {
        fs::read_to_string(self.directory.join("cgroup.events"))
            .is_ok_and(|events| events.lines().any(|line| line == "populated 1"))
    }

    /// CPU time that the group has used, in microseconds.
    pub fn cpu_time(&self) -> Option<u64> {
        let table = fs::read_to_string(self.directory.join("cpu.stat")).ok()?;
        table.lines().find_map(|line| line.strip_prefix("usage_usec "))?.parse().ok()
    }

    /// Kills every process in the group.
    pub fn kill(&self) -> io::Result<()> {
        fs::write(self.directory.join("cgroup.kill"), "1")
    }

    /// Removes the group, with those that the command made below it. Processes that are still
    /// in it go to the group above, which thaws them.
    pub fn remove(&self) {
        for pid in self.processes() {
            if let Some(parent) = self.directory.parent() {
                let _ = fs::write(parent.join("cgroup.procs"), pid.to_string());
            }
        }
        remove_tree(&self.directory);
    }
}

fn collect(directory: &Path, file: &str, found: &mut Vec<i32>) {
    let list = fs::read_to_string(directory.join(file)).unwrap_or_default();
    found.extend(list.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0));
    // A group has two links and one for each that lies below: most have none, and listing the
    // directory takes much longer than this look.
    if fs::metadata(directory).is_ok_and(|it| it.nlink() == 2) {
        return;
    }
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), file, found);
        }
    }
}

fn remove_tree(directory: &Path) {
    if fs::remove_dir(directory).is_ok() {
        return;
    }
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    let _ = fs::remove_dir(directory);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outermost_tenants_group_is_found() {
        let group = "/a/krex-0123abcd-7-1";
        assert_eq!(tenants_group(group), Some(group));
        assert_eq!(tenants_group("/a/krex-0123abcd-7-1/sub/krex-0123abcd-8-1"), Some(group));
        for other in ["/", "/a", "/krex-ci.service", "/krex-0123abcd-7", "/xkrex-0123abcd-7-1"] {
            assert_eq!(tenants_group(other), None, "{other}");
        }
    }

    #[test]
    fn the_mount_is_found_wherever_it_is() {
        let hybrid = "30 24 0:26 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 c rw\n";
        let mount = Mount::parse(hybrid).unwrap();
        assert_eq!(mount.directory("/a/b").unwrap(), Path::new("/sys/fs/cgroup/unified/a/b"));
        let container = "5 4 0:6 /docker/x /my\\040cg rw - cgroup2 cgroup rw";
        let mount = Mount::parse(container).unwrap();
        assert_eq!(mount.directory("/docker/x/y").unwrap(), Path::new("/my cg/y"));
        assert_eq!(mount.directory("/docker/xy"), None);
        assert_eq!(mount.directory("/docker/x/../z"), None);
        assert_eq!(Mount::parse("5 4 0:6 / /sys rw - cgroup cgroup rw"), None);
    }
}
