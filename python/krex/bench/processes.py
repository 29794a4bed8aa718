"""Ending processes: one and all that descends from it, or with the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

from krex._procfs import processes

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> Callable[[], None]:
    """Return what a child calls before it executes, so that the kernel ends it with this thread.

    That holds for the program that it executes, too (unless that changes the user), not for what
    that starts in turn.
    """
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl  # looked up before there is a child

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL.value, 0, 0, 0)
        if os.getppid() != parent:  # too late to be told
            os._exit(1)

    return ask


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
