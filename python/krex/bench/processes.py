"""Ending a process and all that descends from it."""

from __future__ import annotations

import contextlib
import os
import signal

from krex._procfs import processes


def kill_tree(root: int) -> None:
    """SIGKILL a process that was not waited for yet, and its descendants in whatever group.

    Who was detached from it (its parent has ended) is not found.
    """
    stopped: set[int] = set()
    while born := tree(root) - stopped:
        # All stand still before the first one dies: none can start another meanwhile, and the
        # children of the dead would have another parent.
        for pid in born:
            _signal(pid, signal.SIGSTOP)
        stopped |= born
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def tree(root: int) -> set[int]:
    """Return a process and its descendants."""
    children: dict[int, list[int]] = {}
    for pid in processes():
        parent = _parent(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found = {root}
    waiting = [root]
    while waiting:
        more = [it for it in children.get(waiting.pop(), []) if it not in found]
        found.update(more)
        waiting += more
    return found


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # After the name, which may contain anything.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):  # it is gone
        return None


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
