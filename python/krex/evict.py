"""``krex evict``: ends commands by hand, such as those whose work on a GPU never ends."""

from __future__ import annotations

import time

from krex import _krex
from krex._text import one_line

#: SIGKILL comes five seconds after SIGTERM; then the kernel takes the process apart.
_LIMIT_S = 12.0
_PAUSE_S = 0.05


def run(who: str | None, *, only_stuck: bool) -> int:
    """End the tenant that `who` means, or all that are stuck; return the exit status.

    Says what ended, and what did not: a process inside of a driver that does not return cannot be
    ended by anybody.

    Raises:
        krex.RegionError: nobody, or more than one, is called `who`.
    """
    evicted = _krex.evict(who, only_stuck)
    if not evicted:
        print("nobody is stuck" if who is None else f"{one_line(who)} is not stuck")
        return 0
    left = set(evicted)
    deadline = time.monotonic() + _LIMIT_S
    while left and time.monotonic() < deadline:
        there = {(it["name"], it["pid"]) for it in _krex.snapshot()["tenants"] if it["evicted"]}
        for name, pid in sorted(left - there):
            print(f"ended {one_line(name)} ({pid})", flush=True)
        left &= there
        if left:
            time.sleep(_PAUSE_S)
    for name, pid in sorted(left):
        print(f"{one_line(name)} ({pid}) has not ended: see `dmesg`, or reset its GPU", flush=True)
    return 125 if left else 0
