"""Where this process stands in the cgroup v2 tree, and what it may do there."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from krex._procfs import Mount

_PROBE = "krex-doctor-"
_TENANT = "krex-"


class NoCgroupError(Exception):
    """This process's cgroup v2 directory cannot be reached; the message says why."""


def cgroup2_mounts(table: Sequence[Mount]) -> list[Mount]:
    """Return the cgroup v2 mounts that are not hidden beneath a later mount, the latest first.

    There may be one below a v1 tree (the "hybrid" layout), or several.
    """
    return [
        mount for mount in reversed(table) if mount.filesystem == "cgroup2" and _is_visible(mount)
    ]


def _is_visible(mount: Mount) -> bool:
    try:
        return os.stat(mount.mount_point).st_dev == mount.device
    except OSError:
        return False


def own_directory(table: Sequence[Mount]) -> str:
    """Return the directory of this process's own cgroup.

    Raises:
        NoCgroupError: no cgroup v2 tree is mounted, or the process's own cgroup is outside of it.
        OSError: /proc cannot be read.
    """
    candidates = cgroup2_mounts(table)
    if not candidates:
        raise NoCgroupError("no cgroup v2 tree is mounted")
    path = _membership()
    if path is None:
        raise NoCgroupError("the kernel puts this process into no cgroup v2 group")
    for mount in candidates:
        below = _below(path, mount.root)
        if below is None:
            continue
        directory = os.path.normpath(os.path.join(mount.mount_point, below))
        if os.path.exists(os.path.join(directory, "cgroup.procs")):
            return directory
    raise NoCgroupError(
        f"this process's cgroup {path} is not visible below {candidates[0].mount_point}"
    )


def _membership() -> str | None:
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            if line.startswith("0::"):
                return line[3:].rstrip("\n")
    return None


def _below(path: str, root: str) -> str | None:
    if root == "/":
        return path.lstrip("/")
    if path == root:
        return ""
    return path[len(root) + 1 :] if path.startswith(root + "/") else None


def try_child(directory: str) -> None:
    """Make a cgroup below `directory`, thaw it (which changes nothing), and remove it again.

    Raises:
        OSError: a step was refused; its filename and error number say which and why.
    """
    import time

    child = os.path.join(directory, f"{_PROBE}{os.getpid()}-{time.monotonic_ns():x}")
    os.mkdir(child)
    try:
        _write(os.path.join(child, "cgroup.freeze"), b"0")
        if "invalid" in _read(os.path.join(child, "cgroup.type")):
            raise OSError(errno.EOPNOTSUPP, "the group is threaded and takes no processes", child)
    finally:
        os.rmdir(child)
    members = os.path.join(directory, "cgroup.procs")
    if not os.access(members, os.W_OK, effective_ids=True):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), members)


def frozen_tenants(directory: str, runtime_dir: str) -> list[str]:
    """Return the cgroups of a runtime directory below `directory` that are told to be frozen."""
    try:
        from krex._krex import group_prefix

        prefix = group_prefix(runtime_dir)
    except ImportError:
        prefix = _TENANT
    found = []
    for parent, children, _ in os.walk(directory):
        for child in children:
            if child.startswith(prefix) and not child.startswith(_PROBE):
                path = os.path.join(parent, child)
                if _asked_to_freeze(path):
                    found.append(path)
    return sorted(found)


def _asked_to_freeze(directory: str) -> bool:
    try:
        return _read(os.path.join(directory, "cgroup.freeze")) == "1"
    except OSError:
        return False


def _read(path: str) -> str:
    with open(path, encoding="ascii", errors="replace") as file:
        return file.read().strip()


def _write(path: str, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
