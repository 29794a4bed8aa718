"""The machine that numbers were measured on, and what else it is doing."""

from __future__ import annotations

import os
import platform
import re
import resource
import time
from collections.abc import Collection
from typing import Any

from krex.bench.errors import BenchUsageError

# The numbers are small, or a range would fill the memory.
_CPUS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5})(?::(0*[1-9][0-9]{0,4}))?)?")


def describe() -> dict[str, Any]:
    """Return what the numbers depend on, as plain data."""
    processor = _fields("/proc/cpuinfo")
    memory = _fields("/proc/meminfo").get("MemTotal", "0").split()
    return {
        "cpu": processor.get("model name", platform.machine()),
        "cores": len(os.sched_getaffinity(0)),
        "virtual": "hypervisor" in processor.get("flags", "").split(),
        "memory_gib": round(int(memory[0]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _fields(path: str) -> dict[str, str]:
    """Return the first value of each name of a file like /proc/cpuinfo."""
    found: dict[str, str] = {}
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, colon, value = line.partition(":")
            if colon:
                found.setdefault(name.strip(), value.strip())
    return found


def in_words(machine: dict[str, Any]) -> str:
    """Return a description by `describe` as one line."""
    return (
        f"{machine['cpu']}{' (virtual)' if machine['virtual'] else ''}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']}"
    )


def busy_share(seconds: float = 0.5) -> float:
    """Return the share of all CPU time that is used or stolen during the next `seconds`."""
    total, busy = _ticks("cpu")
    time.sleep(seconds)
    total_after, busy_after = _ticks("cpu")
    return (busy_after - busy) / max(1, total_after - total)


class OthersUse:
    """What other processes use of some CPUs, from its making on.

    Others are all but this process and those of its children that it has waited for; what the
    hypervisor gave to other guests counts, too.
    """

    def __init__(self, cpus: Collection[int]) -> None:
        self._names = [f"cpu{it}" for it in cpus]
        self._busy = self._busy_now()
        self._own = _own_seconds()

    def seconds(self) -> float:
        """Return the CPU seconds that others have used, as far as the kernel's ticks tell."""
        ticks = self._busy_now() - self._busy
        return max(0.0, ticks / os.sysconf("SC_CLK_TCK") - (_own_seconds() - self._own))

    def _busy_now(self) -> int:
        return sum(_ticks(it)[1] for it in self._names)


def _own_seconds() -> float:
    used = [resource.getrusage(it) for it in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(it.ru_utime + it.ru_stime for it in used)


def _ticks(name: str) -> tuple[int, int]:
    """Return all ticks, and those not idle, of a line of /proc/stat; none if it is not there."""
    with open("/proc/stat", encoding="utf-8") as file:
        for line in file:
            words = line.split()
            if words[0] == name:
                ticks = [int(it) for it in words[1:9]]
                return sum(ticks), sum(ticks) - ticks[3] - ticks[4]
    return 0, 0


def parse_cpus(text: str, allowed: Collection[int]) -> set[int]:
    """Return the CPUs of a list like ``0-3,8`` or ``8-14:2``, as taskset has it.

    Raises:
        BenchUsageError: if it is none, or one of them is not in `allowed`.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        found = _range(part.strip())
        if not found:
            raise BenchUsageError(f"{text!r} is no list of CPUs like 0-3,8")
        cpus.update(found)
    if missing := sorted(cpus - set(allowed)):
        there = ",".join(str(it) for it in sorted(allowed))
        raise BenchUsageError(f"CPU {missing[0]} may not be used here; there are {there}")
    return cpus


def _range(part: str) -> range:
    """Return the CPUs of ``5``, ``0-3`` or ``8-14:2``; none if it is none of these."""
    found = _CPUS.fullmatch(part)
    if found is None:
        return range(0)
    first, last, stride = found.groups()
    return range(int(first), int(last or first) + 1, int(stride or 1))
