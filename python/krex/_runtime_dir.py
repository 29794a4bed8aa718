"""The checks of ``krex doctor`` on the runtime directory."""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator

from krex import _procfs
from krex._findings import Finding, Machine, default_runtime_dir, reason

#: Bytes that are looked for in the runtime directory if the extension does not say how many.
_ASSUMED_SEGMENT_SIZE = 4 << 20


def check_runtime_dir(machine: Machine) -> Iterator[Finding]:
    """The runtime directory: there or creatable, a directory, ours, private, writable."""
    directory = machine.runtime_dir
    given = machine.environ.get("KREX_RUNTIME_DIR") or directory
    if not os.path.isabs(given):
        yield Finding(
            "runtime-dir",
            "error",
            f"KREX_RUNTIME_DIR is the relative path {given!r}, "
            "another directory in every working directory",
            f"export KREX_RUNTIME_DIR={shlex.quote(directory)}",
        )
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        yield _creatable(directory)
        return
    except OSError as error:
        yield Finding("runtime-dir", "error", f"the runtime directory is out of reach ({error})")
        return
    yield _private(directory, status) or _writable(machine)


def _creatable(directory: str) -> Finding:
    parent = os.path.dirname(directory.rstrip("/"))
    quoted = shlex.quote(directory)
    if os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK, effective_ids=True):
        return Finding("runtime-dir", "ok", f"{directory} will be made by the first command")
    if not os.path.isdir(parent):
        cause = f"{parent} does not exist"
        remedy = f"mkdir -p {shlex.quote(parent)} && mkdir -m 700 {quoted}"
    else:
        cause = f"{parent} is not writable"
        remedy = f"sudo install -d -m 700 -o {os.geteuid()} {quoted}"
    return Finding("runtime-dir", "error", f"{directory} cannot be made: {cause}", remedy)


def _private(directory: str, status: os.stat_result) -> Finding | None:
    quoted = shlex.quote(directory)
    if not stat.S_ISDIR(status.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a directory"
        # Only what has a name of krex's own: anything else may be somebody's.
        own = os.path.basename(directory).startswith("krex")
        other = f"export KREX_RUNTIME_DIR={shlex.quote(_unowned(directory))}"
        remedy = f"rm {quoted}" if own else other
        return Finding("runtime-dir", "error", f"{directory} is {what}", remedy)
    if status.st_uid != os.geteuid():
        return Finding(
            "runtime-dir",
            "error",
            f"{directory} belongs to user {status.st_uid}, not to user {os.geteuid()}",
            f"export KREX_RUNTIME_DIR={shlex.quote(_unowned(directory))}",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode != 0o700:
        return Finding(
            "runtime-dir",
            "error",
            f"{directory} has mode {mode:04o} instead of 0700",
            f"chmod 700 {quoted}"
            if set(os.listdir(directory)) <= {"segment", "krex.log"}
            else f"export KREX_RUNTIME_DIR={shlex.quote(_unowned(directory))}",
        )
    return None


def _unowned(directory: str) -> str:
    default = default_runtime_dir()
    return default if directory != default else f"{default}-private"


def _writable(machine: Machine) -> Finding:
    directory = machine.runtime_dir
    try:
        _try_to_allocate(directory, 1 if os.path.exists(machine.segment) else _segment_size())
    except OSError as error:
        remedy = None
        mount = _mount_of(machine, directory)
        point = shlex.quote(mount.mount_point)
        if error.errno == errno.ENOSPC:
            return Finding(
                "runtime-dir",
                "error",
                f"{directory} is full: {_segment_size()} bytes are needed, "
                f"{_free(directory)} are free",
                f"mount -o remount,size={_enough(directory)} {point}"
                if mount.filesystem == "tmpfs"
                else None,
            )
        if error.errno == errno.EROFS:
            remedy = f"mount -o remount,rw {point}"
        return Finding(
            "runtime-dir", "error", f"{directory} is not writable ({reason(error)})", remedy
        )
    return Finding("runtime-dir", "ok", f"{directory} is private and writable")


def _try_to_allocate(directory: str, size: int) -> None:
    """Allocate `size` bytes in a file without a name, which is gone when closed."""
    try:
        descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        if not os.access(directory, os.W_OK | os.X_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory) from None
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    finally:
        os.close(descriptor)


def _free(directory: str) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _enough(directory: str) -> int:
    """Return a size in bytes for the file system that leaves ample room for the segment."""
    status = os.statvfs(directory)
    return status.f_blocks * status.f_frsize + 4 * _segment_size()


def _segment_size() -> int:
    try:
        from krex import _krex
    except ImportError:
        return _ASSUMED_SEGMENT_SIZE
    return int(getattr(_krex, "SEGMENT_SIZE", _ASSUMED_SEGMENT_SIZE))


def check_runtime_filesystem(machine: Machine) -> Iterator[Finding]:
    """Whether the runtime directory is in memory."""
    existing = machine.runtime_dir
    while not os.path.exists(existing):
        existing = os.path.dirname(existing) or "."
    filesystem = _mount_of(machine, existing).filesystem
    if filesystem in ("tmpfs", "ramfs"):
        free = _free(existing) >> 20
        yield Finding(
            "runtime-dir.filesystem",
            "ok",
            f"{existing} is in memory ({filesystem}, {free} MiB free)",
        )
    else:
        yield Finding(
            "runtime-dir.filesystem",
            "warning",
            f"{existing} is on {filesystem} instead of tmpfs, so that waits can hit a disk "
            "and a network file system excludes nobody on other machines",
            f"export KREX_RUNTIME_DIR={shlex.quote(default_runtime_dir())}",
        )


def _mount_of(machine: Machine, path: str) -> _procfs.Mount:
    real = os.path.realpath(path)
    within = [mount for mount in machine.mounts if _procfs.is_within(real, mount.mount_point)]
    if not within:
        raise LookupError(f"no mount holds {path}")
    # Of several mounts on one point, the last hides the others.
    return max(enumerate(within), key=lambda item: (len(item[1].mount_point), item[0]))[1]
