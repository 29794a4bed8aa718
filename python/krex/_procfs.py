"""What /proc says: the mount table, and which processes map a file of a given name."""

from __future__ import annotations

import os
import re
import stat
from typing import NamedTuple

_OCTAL_ESCAPE = re.compile(r"\\([0-7]{3})")
_DELETED = " (deleted)"


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    device: int
    root: str
    mount_point: str
    filesystem: str


class Mapping(NamedTuple):
    """A file that a process maps; `path` is the one that the process itself would use."""

    pid: int
    addresses: str
    device: int
    inode: int
    path: str
    deleted: bool


class Identity(NamedTuple):
    """What tells two files apart, whatever they are called."""

    device: int
    inode: int


def mounts() -> list[Mount]:
    """Return this process's mount table, in the order of mounting.

    Raises:
        OSError: /proc is not mounted.
    """
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        return [mount for line in file if (mount := _parse_mount(line)) is not None]


def _parse_mount(line: str) -> Mount | None:
    fields, separator, rest = line.rstrip("\n").partition(" - ")
    columns = fields.split(" ")
    if not separator or len(columns) < 5:
        return None
    major, _, minor = columns[2].partition(":")
    return Mount(
        device=os.makedev(int(major), int(minor)),
        root=_unescape(columns[3]),
        mount_point=_unescape(columns[4]),
        filesystem=rest.split(" ", 1)[0],
    )


def _unescape(field: str) -> str:
    return _OCTAL_ESCAPE.sub(lambda match: chr(int(match[1], 8)), field)


def processes() -> list[int]:
    """Return the ids of all processes that this /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isascii() and name.isdigit()]


def mappings_of(pid: int, file_name: str) -> list[Mapping]:
    """Return the files called `file_name`, in whatever directory, that process `pid` maps.

    A file counts once, however often it is mapped.

    Raises:
        PermissionError: the process may not be looked at (another user's, for example).
        OSError: it is gone.
    """
    with open(f"/proc/{pid}/maps", "rb") as file:
        text = file.read()
    if os.fsencode(f"/{file_name}") not in text:
        return []
    found: dict[tuple[int, int], Mapping] = {}
    for line in text.splitlines():
        mapping = _parse_mapping(pid, os.fsdecode(line))
        if mapping is not None and os.path.basename(mapping.path) == file_name:
            found.setdefault((mapping.device, mapping.inode), mapping)
    return list(found.values())


def _parse_mapping(pid: int, line: str) -> Mapping | None:
    columns = line.split(None, 5)
    if len(columns) < 6 or not columns[5].startswith("/"):
        return None
    path = columns[5]
    deleted = path.endswith(_DELETED)
    major, _, minor = columns[3].partition(":")
    return Mapping(
        pid=pid,
        addresses=columns[0],
        device=os.makedev(int(major, 16), int(minor, 16)),
        inode=int(columns[4]),
        path=path.removesuffix(_DELETED) if deleted else path,
        deleted=deleted,
    )


def identity(path: str) -> Identity | None:
    """Return the identity of the file at `path`, or None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return Identity(status.st_dev, status.st_ino)


def mapped_file(mapping: Mapping) -> str | None:
    """Return a path through which the mapped file can be reached from here, or None.

    The process may live in another mount namespace, and the file may have been removed.
    """
    for path in (
        f"/proc/{mapping.pid}/root{mapping.path}",
        f"/proc/{mapping.pid}/map_files/{mapping.addresses}",
    ):
        found = identity(path)
        if found is not None and found.inode == mapping.inode:
            return path
    return None


def first_bytes(path: str, count: int) -> bytes | None:
    """Return the first `count` bytes of a regular file, or None if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        return os.pread(descriptor, count, 0)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def namespace(pid: int | str, kind: str) -> str | None:
    """Return the identity of a process's namespace (`kind` as in /proc/PID/ns), or None."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def owner(pid: int) -> int | None:
    """Return the user id that a process runs as, or None if it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def is_within(path: str, directory: str) -> bool:
    """Return whether an absolute path is `directory` or lies below it."""
    return os.path.commonpath([path, directory]) == directory
