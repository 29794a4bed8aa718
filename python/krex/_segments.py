"""Finding the processes on this machine that use a segment other than ours."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from krex import _procfs

#: The first bytes of every segment, of whatever layout.
MAGIC = b"krex\x00seg"
# The header's first four words, which no version changes: magic, layout, size, retired.
_HEADER = struct.Struct("<8sQQQ")


@dataclass
class Elsewhere:
    """A segment other than ours, and who uses it."""

    path: str
    """As the first of its users would call it."""
    removed: bool
    pids: list[int]

    @property
    def directory(self) -> str:
        """The runtime directory, as the first of its users would call it."""
        return os.path.dirname(self.path)

    def users(self) -> set[int]:
        """Return the ids of the users whose processes use it."""
        return {user for pid in self.pids if (user := _procfs.owner(pid)) is not None}

    def is_in_another_mount_namespace(self) -> bool:
        """Return whether its first user sees other file systems than we do."""
        return _procfs.namespace(self.pids[0], "mnt") != _procfs.namespace("self", "mnt")


def elsewhere(ours: str) -> tuple[list[Elsewhere], int]:
    """Return the segments in use that are not the file `ours`, and how many processes hid.

    What counts is the file (device and inode), not its path: a private /dev/shm has the same
    paths with other files behind them. Processes of other users can only be looked at by root.
    """
    our_file = _procfs.identity(ours)
    found: dict[_procfs.Identity, Elsewhere] = {}
    hidden = 0
    for pid in sorted(_procfs.processes()):
        try:
            mappings = _procfs.mappings_of(pid, "segment")
        except PermissionError:
            hidden += 1
            continue
        except OSError:  # gone meanwhile
            continue
        for mapping in mappings:
            reached = _procfs.mapped_file(mapping)
            file = _procfs.identity(reached) if reached is not None else None
            file = file or _procfs.Identity(mapping.device, mapping.inode)
            if file != our_file and _is_in_use(mapping, reached):
                entry = found.setdefault(file, Elsewhere(mapping.path, mapping.deleted, []))
                entry.pids.append(pid)
    return list(found.values()), hidden


def _is_in_use(mapping: _procfs.Mapping, reached: str | None) -> bool:
    header = _procfs.first_bytes(reached, _HEADER.size) if reached is not None else None
    if header is None:  # removed, or out of reach: only its name can tell
        return os.path.basename(os.path.dirname(mapping.path)).startswith("krex-")
    if len(header) < _HEADER.size:
        return False
    magic, _layout, _size, retired = _HEADER.unpack(header)
    return bool(magic == MAGIC and not retired)
