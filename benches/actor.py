"""What the measured processes do; run by stage.py.

sibling   has threads, idle or busy, and ends with its standard input
holder    enters and leaves regions as lines of JSON on standard input say
hog       uses a CPU until its parent is gone
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import stage

BLOCK = bytes(64 * 1024)


def start_threads(arguments: argparse.Namespace) -> None:
    """As many threads as asked for, of which some compute all the time."""
    for number in range(arguments.threads - 1):
        compute = number < arguments.busy
        target = _compute if compute else threading.Event().wait
        threading.Thread(target=target, daemon=True).start()


def sibling(arguments: argparse.Namespace) -> None:
    start_threads(arguments)
    print("ready", flush=True)
    if arguments.pulse:
        with open(arguments.pulse, "r+b") as file:
            _beat(mmap.mmap(file.fileno(), stage.PULSE_SIZE))
    sys.stdin.read()


def _compute() -> None:
    while True:
        hashlib.sha256(BLOCK)  # without the interpreter's lock


def _beat(pulse: mmap.mmap) -> None:
    """Note every stretch in which this process did not run."""
    parent = os.getppid()
    last = time.monotonic_ns()
    pauses = 0
    while os.getppid() == parent:
        time.sleep(0.0002)
        now = time.monotonic_ns()
        if now - last > stage.PAUSE_NS and pauses < stage.PAUSES:
            struct.pack_into("<QQ", pulse, stage.pause_offset(pauses), last, now)
            pauses += 1
        struct.pack_into("<QQ", pulse, 0, now, pauses)
        last = now


def holder(arguments: argparse.Namespace) -> None:
    import krex
    from krex import region

    start_threads(arguments)

    def measure(repeats: int, hold: float, pause: float) -> list[dict[str, Any]]:
        """Enter and leave; in seconds, and who was frozen how."""
        results = []
        for _ in range(repeats):
            time.sleep(pause)
            critical = region.critical()
            start = time.perf_counter()
            critical.__enter__()
            entered = time.perf_counter()
            while time.perf_counter() < entered + hold:
                pass
            leaving = time.perf_counter()
            critical.__exit__(None, None, None)
            left = time.perf_counter()
            while any(it["frozen"] for it in krex.snapshot()["tenants"]):
                time.sleep(0.00005)
            report = critical.report
            results.append(
                {
                    "entry": entered - start,
                    "freeze": report.drain_s + report.freeze_s,
                    "isolate": report.isolate_s,
                    "exit": left - leaving,
                    "thawed": time.perf_counter() - leaving,
                    "verdict": report.verdict,
                    "siblings": len(report.siblings),
                }
            )
        return results

    actions: dict[str, Callable[..., Any]] = {"measure": measure}
    print("ready", flush=True)
    for line in sys.stdin:
        word, options = json.loads(line)
        print(json.dumps(actions[word](**options)), flush=True)


def hog() -> None:
    parent = os.getppid()
    print("ready", flush=True)
    while os.getppid() == parent:
        for _ in range(100_000):
            pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("sibling", "holder", "hog"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--pulse")
    arguments = parser.parse_args()
    if arguments.role == "sibling":
        sibling(arguments)
    elif arguments.role == "holder":
        holder(arguments)
    else:
        hog()


if __name__ == "__main__":
    main()
