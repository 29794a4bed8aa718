//! The shared file: where it is, how it comes into being, and who may use it.

use std::ffi::CString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::FlockOperation;

use crate::clock;
use crate::error::{Error, Result};
use crate::layout::{Header, LAYOUT, Layout, MAGIC, SIZE};

/// Byte offset, far behind the end of the file, of the record lock of supervisor slot 0.
const SUPERVISOR_LOCKS: i64 = 1 << 40;

/// `$KREX_RUNTIME_DIR`, or `/dev/shm/krex-UID`.
///
/// # Errors
/// If it is not an absolute path: it would be another directory for each working directory.
pub fn runtime_dir() -> Result<PathBuf> {
    match std::env::var_os("KREX_RUNTIME_DIR").filter(|value| !value.is_empty()) {
        Some(value) if Path::new(&value).is_absolute() => Ok(PathBuf::from(value)),
        Some(value) => Err(Error::Invalid(format!(
            "KREX_RUNTIME_DIR is the relative path {value:?}, another directory for each working \
             directory. Use an absolute path"
        ))),
        None => {
            let user = rustix::process::geteuid().as_raw();
            Ok(PathBuf::from(format!("/dev/shm/krex-{user}")))
        }
    }
}

/// The mapped segment. It holds a shared lock on the file for as long as it lives.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<Layout>,
    directory: PathBuf,
    /// When the path was last seen to name the file.
    looked_at: AtomicU64,
    /// Device and inode of the file.
    file: (u64, u64),
    /// Holds the shared lock. Never used for anything else: a tenant that closes all its
    /// descriptors may have given the number to another file.
    _lock: File,
}

// SAFETY: the mapping is not tied to a thread, and `Layout` is made of atomics only.
unsafe impl Send for Segment {}
// SAFETY: as above; shared access is what atomics are for.
unsafe impl Sync for Segment {}

impl Deref for Segment {
    type Target = Layout;

    fn deref(&self) -> &Layout {
        // SAFETY: `base` points to a live mapping of SIZE bytes, page-aligned, readable and
        // writable, unmapped only in `drop`; every bit pattern is a valid `Layout`, and all
        // that another process may change meanwhile is atomic.
        unsafe { self.base.as_ref() }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: `base` is the address of a mapping of SIZE bytes that this value owns, and no
        // reference into it can outlive `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), SIZE) };
    }
}

impl Segment {
    /// Opens the segment in `directory`, making both if they are missing.
    ///
    /// # Errors
    /// [`Error::Segment`] with the remedy, if the directory or file is not ours, not private,
    /// full, of another layout, or not a segment.
    pub fn open_or_create(directory: &Path) -> Result<Self> {
        make_directory(directory)?;
        // A segment can vanish between two steps (purged, or replaced by another version), so
        // try again; a few times are plenty.
        for _ in 0..16 {
            if let Some(segment) = Self::open(directory)? {
                return Ok(segment);
            }
            create(directory)?;
        }
        Err(Error::segment(
            directory,
            "the segment keeps vanishing while it is opened",
            "Find what removes it, or set KREX_RUNTIME_DIR to another directory",
        ))
    }

    /// Opens the segment in `directory`; `None` if there is none.
    ///
    /// # Errors
    /// As [`Segment::open_or_create`].
    pub fn open(directory: &Path) -> Result<Option<Self>> {
        if !check_directory(directory)? {
            return Ok(None);
        }
        let path = directory.join("segment");
        let file = match OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK)
            .open(&path)
        {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                let remedy = format!("Remove it: `rm -r {}`", path.display());
                return Err(Error::segment(&path, format!("cannot be opened ({error})"), remedy));
            }
        };
        let file = above_standard_streams(file)
            .map_err(|error| Error::system(path.display().to_string(), error))?;
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared).map_err(|error| {
            Error::segment(
                &path,
                format!("is being replaced by another version of krex ({error})"),
                "Try again",
            )
        })?;
        let metadata = check_file(&path, &file)?;
        let header = read_header(&path, &file, metadata.size())?;
        if header.layout != u64::from(LAYOUT) {
            drop(file);
            return replace(&path, &header).map(|()| None);
        }
        if header.size != SIZE as u64 || metadata.size() != SIZE as u64 {
            return Err(damaged(&path, "its size is wrong"));
        }
        let base = map(&path, &file)?;
        let identity = (metadata.dev(), metadata.ino());
        let segment = Self {
            base,
            directory: directory.into(),
            file: identity,
            looked_at: AtomicU64::new(0),
            _lock: file,
        };
        // Retired, or unlinked between open and lock: the caller looks for its successor.
        let current = fs::symlink_metadata(&path).ok().map(|it| (it.dev(), it.ino()));
        let is_current = current == Some(identity);
        if segment.is_retired() && is_current {
            // A purge was cut off between the mark and the removal: finish it.
            let _ = fs::remove_file(&path);
        }
        if segment.is_retired() || !is_current {
            return Ok(None);
        }
        Ok(Some(segment))
    }

    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether the segment was purged, so that a new one must be opened.
    #[inline]
    pub fn is_retired(&self) -> bool {
        // Acquire: whoever sees the mark also sees the gates that were opened before it.
        self.header.retired.load(Ordering::Acquire) != 0
    }

    /// The file's inode, which tells it from others that had or have the same path.
    pub fn inode(&self) -> u64 {
        self.file.1
    }

    /// Whether the path still names this very file, so that others find it. Looked at ten times
    /// a second at most, since it takes a fifth of a whole region alone; and what lasts longer
    /// than that is always looked at.
    pub fn is_current(&self) -> bool {
        // Relaxed: a hint about time.
        let now = clock::now();
        if now.saturating_sub(self.looked_at.load(Ordering::Relaxed)) < clock::SECOND / 10 {
            return true;
        }
        self.looked_at.store(now, Ordering::Relaxed);
        let current = fs::symlink_metadata(self.directory.join("segment"));
        current.is_ok_and(|it| (it.dev(), it.ino()) == self.file)
    }

    /// Takes the record lock of a supervisor slot; `None` if another pair holds it. The lock
    /// belongs to the returned file's open description: a forked child shares it.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn lock_supervisor(&self, slot: usize) -> Result<Option<File>> {
        let file = self.reopen()?;
        let mut lock = record_lock(libc::F_WRLCK, slot);
        // SAFETY: fcntl(fd, F_OFD_SETLK, struct flock *) reads the struct, which is initialised
        // and lives through the call; the descriptor is open.
        match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) } {
            0 => Ok(Some(file)),
            _ => Ok(None),
        }
    }

    /// Whether a pair holds the record lock of this supervisor slot, in whatever PID namespace.
    pub fn is_supervisor_alive(&self, slot: usize) -> bool {
        let Ok(file) = self.reopen() else {
            return false;
        };
        let mut lock = record_lock(libc::F_WRLCK, slot);
        // SAFETY: fcntl(fd, F_OFD_GETLK, struct flock *) reads and writes the struct, which is
        // initialised and lives through the call; the descriptor is open.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
        result == 0 && lock.l_type != libc::F_UNLCK as i16
    }

    /// A descriptor of this very file. If somebody removed it by hand, the segment is retired, so
    /// that all who use it open a new one, instead of being alone with it.
    fn reopen(&self) -> Result<File> {
        let path = self.directory.join("segment");
        let file = Self::open_again(&path);
        let is_same = match &file {
            Ok(file) => file.metadata().is_ok_and(|it| (it.dev(), it.ino()) == self.file),
            Err(Error::System { source, .. }) => source.kind() != io::ErrorKind::NotFound,
            Err(_) => true,
        };
        if is_same {
            return file;
        }
        // Gone from the file system, not merely out of this process's sight (chroot, say).
        let is_removed = self
            ._lock
            .metadata()
            .is_ok_and(|it| (it.dev(), it.ino()) == self.file && it.nlink() == 0);
        if is_removed {
            self.header.retired.store(1, Ordering::Release);
        }
        Err(Error::segment(
            &path,
            "was removed while it was in use",
            "Try again: a new one is made",
        ))
    }

    fn open_again(path: &Path) -> Result<File> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)
            .and_then(above_standard_streams)
            .map_err(|error| Error::system(path.display().to_string(), error))
    }
}

/// In a process whose standard streams are closed the file would get one of their numbers, and
/// whatever is printed would go into the segment.
pub(crate) fn above_standard_streams(file: File) -> io::Result<File> {
    if file.as_raw_fd() > libc::STDERR_FILENO {
        return Ok(file);
    }
    let moved = rustix::io::fcntl_dupfd_cloexec(&file, libc::STDERR_FILENO + 1);
    Ok(File::from(moved?))
}

fn record_lock(kind: i32, slot: usize) -> libc::flock {
    // SAFETY: `flock` is a plain C struct of integers, for which all zero is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_start = SUPERVISOR_LOCKS + slot as i64;
    lock.l_len = 1;
    lock
}

fn make_directory(directory: &Path) -> Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(Error::segment(
            directory,
            format!("the runtime directory cannot be made ({error})"),
            "Set KREX_RUNTIME_DIR to a directory on a tmpfs that you may write to, the same for \
             all commands that share a device",
        )),
    }
}

/// Whether the directory is there, ours, and private.
fn check_directory(directory: &Path) -> Result<bool> {
    let metadata = match fs::symlink_metadata(directory) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => {
            let remedy = "Set KREX_RUNTIME_DIR to a directory of your own";
            return Err(Error::segment(directory, format!("cannot be read ({error})"), remedy));
        }
    };
    let user = rustix::process::geteuid().as_raw();
    if !metadata.is_dir() {
        let remedy = "Set KREX_RUNTIME_DIR to a directory of its own";
        return Err(Error::segment(directory, "is not a directory", remedy));
    }
    if metadata.uid() != user {
        return Err(Error::segment(
            directory,
            format!("belongs to user {}, not to you ({user})", metadata.uid()),
            "Set KREX_RUNTIME_DIR to a directory of your own",
        ));
    }
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(Error::segment(
            directory,
            format!("is open to other users (mode {mode:04o})"),
            if holds_nothing_else(directory) {
                format!("Run `chmod 0700 {}`", directory.display())
            } else {
                "Set KREX_RUNTIME_DIR to a directory of its own".to_owned()
            },
        ));
    }
    Ok(true)
}

/// Whether a directory is krex's own, so that advice about it harms nobody.
fn holds_nothing_else(directory: &Path) -> bool {
    let is_own =
        |entry: fs::DirEntry| entry.file_name() == "segment" || entry.file_name() == "krex.log";
    fs::read_dir(directory).is_ok_and(|mut entries| entries.all(|it| it.is_ok_and(is_own)))
}

fn check_file(path: &Path, file: &File) -> Result<fs::Metadata> {
    let metadata = file.metadata().map_err(|error| Error::system("segment", error))?;
    let user = rustix::process::geteuid().as_raw();
    if !metadata.is_file() {
        return Err(damaged(path, "it is not a regular file"));
    }
    if metadata.uid() != user {
        return Err(damaged(path, &format!("it belongs to user {}", metadata.uid())));
    }
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(Error::segment(
            path,
            format!("is open to other users (mode {mode:04o})"),
            format!("Run `chmod 0600 {}`", path.display()),
        ));
    }
    Ok(metadata)
}

fn damaged(path: &Path, problem: &str) -> Error {
    Error::segment(
        path,
        format!("is not a segment of krex: {problem}"),
        "Remove it with `krex recover --purge`; commands that use it go on without krex",
    )
}

struct HeaderValues {
    layout: u64,
    size: u64,
    version: String,
}

fn read_header(path: &Path, file: &File, size: u64) -> Result<HeaderValues> {
    if size < size_of::<Header>() as u64 {
        return Err(damaged(path, "it is too short"));
    }
    let mut bytes = [0_u8; 64];
    std::os::unix::fs::FileExt::read_exact_at(file, &mut bytes, 0)
        .map_err(|error| Error::system(path.display().to_string(), error))?;
    let word = |index: usize| {
        u64::from_le_bytes(bytes[index * 8..index * 8 + 8].try_into().expect("8 bytes"))
    };
    if word(0) != MAGIC {
        return Err(damaged(path, "it does not begin with the magic number"));
    }
    let version = String::from_utf8_lossy(&bytes[32..]).trim_end_matches('\0').to_owned();
    Ok(HeaderValues { layout: word(1), size: word(2), version })
}

/// Removes a segment of another layout, if nobody uses it.
fn replace(path: &Path, header: &HeaderValues) -> Result<()> {
    let file = File::open(path).map_err(|error| Error::system("segment", error))?;
    if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
        fs::remove_file(path).map_err(|error| Error::system("segment", error))?;
        return Ok(());
    }
    let users = lock_owners(&file);
    Err(Error::segment(
        path,
        format!(
            "is in use by krex {} with layout {}; this is krex {} with layout {LAYOUT} \
             (processes: {})",
            header.version,
            header.layout,
            env!("CARGO_PKG_VERSION"),
            if users.is_empty() { "in other PID namespaces".to_owned() } else { users.join(", ") },
        ),
        "Use the same version everywhere, or wait until those have ended, or set KREX_RUNTIME_DIR",
    ))
}

/// Process ids that hold a lock on `file`, as `/proc/locks` shows them.
fn lock_owners(file: &File) -> Vec<String> {
    let Ok(metadata) = file.metadata() else {
        return Vec::new();
    };
    let inode = format!(":{} ", metadata.ino());
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let mut owners: Vec<String> = locks
        .lines()
        .filter(|line| line.contains("FLOCK") && line.contains(&inode))
        .filter_map(|line| line.split_ascii_whitespace().nth(4).map(str::to_owned))
        .filter(|pid| pid != "0" && pid != "-1")
        .collect();
    owners.sort();
    owners.dedup();
    owners
}

/// Makes the file whole before it has its name, so that nobody ever sees half of it.
fn create(directory: &Path) -> Result<()> {
    let path = directory.join("segment");
    let failed = |error: io::Error| {
        Error::segment(
            directory,
            format!("the segment cannot be made ({error})"),
            format!(
                "It takes {} KiB: free some space there, or set KREX_RUNTIME_DIR to another tmpfs",
                SIZE / 1024
            ),
        )
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
        .open(directory)
        .map_err(failed)?;
    // Allocated, not sparse: a full tmpfs is an error here, not a SIGBUS later.
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, SIZE as u64)
        .map_err(|error| failed(error.into()))?;
    let mut header = Vec::new();
    for word in [MAGIC, u64::from(LAYOUT), SIZE as u64, 0] {
        header.extend_from_slice(&word.to_le_bytes());
    }
    header.extend_from_slice(env!("CARGO_PKG_VERSION").as_bytes());
    file.write_all(&header).map_err(failed)?;
    // The umask may have taken away what krex itself needs.
    file.set_permissions(fs::Permissions::from_mode(0o600)).map_err(failed)?;
    let source = CString::new(format!("/proc/self/fd/{}", file.as_raw_fd())).expect("no zero");
    let linked = rustix::fs::linkat(
        rustix::fs::CWD,
        source,
        rustix::fs::CWD,
        &path,
        rustix::fs::AtFlags::SYMLINK_FOLLOW,
    );
    match linked {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()), // somebody was faster: theirs is as good
        Err(error) => Err(failed(error.into())),
    }
}

fn map(path: &Path, file: &File) -> Result<NonNull<Layout>> {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    // SAFETY: a fresh mapping at an address that the kernel chooses overlaps nothing; the file
    // is at least SIZE bytes long (checked), so that no access faults as long as nobody of the
    // same user truncates it.
    let base = unsafe {
        mmap(
            std::ptr::null_mut(),
            SIZE,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            file.as_fd(),
            0,
        )
    }
    .map_err(|error| Error::system(path.display().to_string(), error))?;
    NonNull::new(base.cast()).ok_or_else(|| damaged(path, "it was mapped at address zero"))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let pid = std::process::id();
            let path = PathBuf::from(format!("/dev/shm/krex-test-{pid}-{name}"));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn many_openers_share_one_segment() {
        let directory = Directory::new("many");
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let segment = Segment::open_or_create(&directory.0).unwrap();
                    segment.devices[3].acknowledged.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        let segment = Segment::open(&directory.0).unwrap().unwrap();
        assert_eq!(segment.devices[3].acknowledged.load(Ordering::SeqCst), 16);
        let names: Vec<_> = fs::read_dir(&directory.0).unwrap().collect();
        assert_eq!(names.len(), 1, "nothing is left beside the segment: {names:?}");
    }

    #[test]
    fn damage_is_an_error_with_a_remedy_and_never_a_crash() {
        let directory = Directory::new("damage");
        let path = directory.0.join("segment");
        let open = || Segment::open_or_create(&directory.0).map(drop);
        open().unwrap();
        let good = fs::read(&path).unwrap();
        for (bytes, expected) in [
            (vec![0; SIZE], "magic"),
            (b"short".to_vec(), "too short"),
            (good[..SIZE - 1].to_vec(), "size"),
        ] {
            fs::write(&path, bytes).unwrap();
            let message = open().unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
            assert!(message.contains("recover --purge"), "{message}");
        }
        fs::write(&path, &good).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(open().unwrap_err().to_string().contains("chmod 0600"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        fs::set_permissions(&directory.0, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(open().unwrap_err().to_string().contains("chmod 0700"));
        fs::set_permissions(&directory.0, fs::Permissions::from_mode(0o700)).unwrap();
        open().unwrap();
    }

    #[test]
    fn another_layout_is_replaced_when_unused_and_named_when_used() {
        let directory = Directory::new("layout");
        let path = directory.0.join("segment");
        let user = Segment::open_or_create(&directory.0).unwrap();
        user.header.layout.store(u64::from(LAYOUT) + 1, Ordering::SeqCst);
        let message = Segment::open_or_create(&directory.0).unwrap_err().to_string();
        assert!(message.contains(&format!("layout {}", LAYOUT + 1)), "{message}");
        assert!(message.contains(&std::process::id().to_string()), "{message}");
        drop(user);
        let fresh = Segment::open_or_create(&directory.0).unwrap();
        assert_eq!(fresh.header.layout.load(Ordering::SeqCst), u64::from(LAYOUT));
        assert!(path.exists());
    }

    #[test]
    fn a_supervisor_lock_is_seen_by_others() {
        let directory = Directory::new("lock");
        let segment = Segment::open_or_create(&directory.0).unwrap();
        assert!(!segment.is_supervisor_alive(5));
        let lock = segment.lock_supervisor(5).unwrap().unwrap();
        assert!(segment.is_supervisor_alive(5));
        assert!(!segment.is_supervisor_alive(6));
        assert!(segment.lock_supervisor(5).unwrap().is_none());
        drop(lock);
        assert!(!segment.is_supervisor_alive(5));
    }
}
