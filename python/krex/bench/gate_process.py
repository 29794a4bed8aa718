"""The processes of ``krex bench gate``, by the word on their command line.

sibling FILE  notes in FILE when it ran, until its standard input ends
timer         enters and leaves regions, as often as lines on standard input say
rival         the same, one region after the other without a pause
holder        enters a region and stays in it, until it is killed
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Iterator

# In a sibling's file: its last beat, and the end of the last stretch in which it did not run, in
# nanoseconds of the monotonic clock.
PULSE = struct.Struct("<QQ")
# Shorter stretches than this are the scheduler's, longer ones a freeze.
PAUSE_NS = 3_000_000
_BEAT_S = 0.0002
# How long a timed region lasts, and the time between two of them.
_HELD_S = 0.002
_PAUSE_S = 0.02


def sibling(path: str) -> None:
    """Beat until the parent is gone or closes standard input."""
    parent = os.getppid()
    with open(path, "r+b") as file:
        pulse = mmap.mmap(file.fileno(), PULSE.size)
    print("ready", flush=True)
    last, resumed = time.monotonic_ns(), 0
    while os.getppid() == parent:
        time.sleep(_BEAT_S)
        now = time.monotonic_ns()
        if now - last > PAUSE_NS:
            resumed = now
        PULSE.pack_into(pulse, 0, now, resumed)
        last = now


def timer() -> None:
    """Answer each line, a number of regions, with what they took, in seconds."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(list(_regions(int(line)))), flush=True)


def _regions(count: int) -> Iterator[dict[str, float | str | int]]:
    from krex import snapshot
    from krex.region import critical

    for _ in range(count):
        time.sleep(_PAUSE_S)
        region = critical(label="bench gate")
        start = time.perf_counter()
        region.__enter__()
        entered = time.perf_counter()
        while time.perf_counter() < entered + _HELD_S:
            pass
        leaving = time.perf_counter()
        region.__exit__(None, None, None)
        left = time.perf_counter()
        while any(it["frozen"] for it in snapshot()["tenants"]):
            time.sleep(0.00005)
        yield {
            "enter": entered - start,
            "leave": left - leaving,
            "thawed": time.perf_counter() - leaving,
            "siblings": len(region.report.siblings),
            "verdict": region.report.verdict,
        }


def rival() -> None:
    """Answer each line, a number of regions, with when each was asked for, entered and left.

    In nanoseconds of the monotonic clock, which is the same for all processes.
    """
    from krex.region import critical

    print("ready", flush=True)
    for line in sys.stdin:
        turns = []
        for _ in range(int(line)):
            asked = time.monotonic_ns()
            with critical(label="bench gate"):
                entered = time.monotonic_ns()
                while (leaving := time.monotonic_ns()) < entered + _HELD_S * 1e9:
                    pass
            turns.append((asked, entered, leaving))
        print(json.dumps(turns), flush=True)


def holder() -> None:
    """Hold a region, busy as holders are."""
    from krex.region import critical

    parent = os.getppid()
    with critical(label="bench gate"):
        print("ready", flush=True)
        while os.getppid() == parent:
            pass


def main() -> None:
    """Be the process that the command line names."""
    role = sys.argv[1]
    if role == "sibling":
        sibling(sys.argv[2])
    else:
        {"timer": timer, "rival": rival, "holder": holder}[role]()
