"""Measures on the first GPU what krex adds to calls, and what a region's ends take.

Run by benches/gpu.sh. Prints tables and writes JSON; leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from krex.bench import machine
from results import Part, Row, lines, percentile
from stage import Stage

from gpu import crew

ROOT = Path(__file__).parents[2]
_SOURCE = Path(__file__).with_name("launches.c")
_STEPS = ("wait", "drain", "freeze", "isolate", "restore", "pending_at_exit")
_TORCH_CALLS = 200


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stage() -> Iterator[tuple[Stage, crew.Crew]]:
    with Stage() as stage:
        found = subprocess.run(
            crew.program("driver"),
            env=stage.environment,
            check=True,
            text=True,
            stdout=subprocess.PIPE,
            timeout=crew.LIMIT_S,
        )
        yield stage, crew.Crew(stage.start, found.stdout.split()[0])


def overhead(quick: bool) -> Part:
    """Calls of the driver, through the wrapper and directly."""
    part = Part("overhead", "Calls of the driver, through krex's wrapper and directly, gate open")
    with tempfile.TemporaryDirectory() as directory, _stage() as (_, people):
        library = str(Path(directory) / "launches.so")
        options = ["-O2", "-Wall", "-shared", "-fPIC"]
        subprocess.run(["cc", *options, "-o", library, str(_SOURCE)], check=True)
        words = crew.program("overhead", "driver", library, "200" if quick else "1000")
        process = people.run(*words, name="overhead")
        found = json.loads(crew.read_line(process, 4 * crew.LIMIT_S))
        crew.end(process)
    if not found.pop("is_wrapped"):
        raise RuntimeError("the interposer was not loaded: nothing is measured")
    for name, times in found.items():
        part.rows.append(_added_row(name, times["direct"], times["wrapper"], 0.01))
    part.notes += [
        "medians of blocks of 100 calls, in turns, in one process, on one CPU; "
        "added: of the differences of neighbours; p25, p75: of the same",
        "the graph has ten nodes; the copy is 4 KiB within the device",
    ]
    return part


def _added_row(name: str, direct: list[float], wrapped: list[float], aim: float | None) -> Row:
    """A row from times that were taken in turns; all in nanoseconds."""
    middle = percentile(direct, 0.5)
    added = [it - other for it, other in zip(wrapped, direct, strict=True)]
    share = percentile(added, 0.5) / middle
    note = "" if aim is None else f"adds {share:.2%}; aim {aim:.0%} {_met(share <= aim)}"
    values = {
        "direct": middle,
        "wrapper": percentile(wrapped, 0.5),
        "added": percentile(added, 0.5),
        "p25": percentile(added, 0.25),
        "p75": percentile(added, 0.75),
    }
    return Row(name, "ns", values, len(direct), None, note)


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def torch_calls(quick: bool) -> Part:
    """`add_` on a tiny tensor, in a process with the interposer and in one without."""
    part = Part("torch", "torch `add_` on 8 floats, with krex's interposer and without")
    if importlib.util.find_spec("torch") is None:
        part.notes.append("torch is not installed")
        return part
    times: dict[str, list[float]] = {"0": [], "1": []}
    with _stage() as (stage, people):
        processes = {}
        for preload in times:
            stage.environment["KREX_PRELOAD"] = preload
            words = crew.program("overhead", "torch", str(_TORCH_CALLS))
            processes[preload] = people.run(*words, name=f"torch {preload}")
            crew.expect(processes[preload], "ready")
        for number in range(20 if quick else 200):
            for preload in sorted(times, reverse=bool(number % 2)):
                process = processes[preload]
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
                times[preload].append(float(crew.read_line(process)))
        for process in processes.values():
            crew.end(process)
    part.rows.append(_added_row("torch add_", times["0"], times["1"], 0.01))
    part.notes.append(
        "two processes in turns on one CPU, since torch keeps the addresses that it found; "
        "two processes differ by some percent by themselves"
    )
    return part


def regions(quick: bool) -> Part:
    """Entry and exit of a region, by step."""
    part = Part("regions", "Entry and exit of a region on a GPU, by step (medians; p95)")
    _measure_regions(part, quick, preload=True)
    part.notes += REGION_NOTES
    return part


def locked(quick: bool) -> Part:
    """The same beside siblings without the interposer, for which there is the driver's lock."""
    title = "Entry and exit of a region on a GPU, beside siblings without the interposer"
    part = Part("locked", title)
    _measure_regions(part, quick, preload=False)
    part.notes += REGION_NOTES
    return part


REGION_NOTES = [
    "enter, exit: the holder's own time in `__enter__` and `__exit__`; the steps are those of "
    "its report",
    "idle: siblings with a context and nothing outstanding; saturate: up to 8 launches ahead, "
    "each a whole GPU's 0.15 ms; work: five such launches of the holder's are outstanding at the "
    "region's end",
]


def _measure_regions(part: Part, quick: bool, preload: bool) -> None:
    count = 8 if quick else 40
    for kind in ("idle", "saturate"):
        for siblings in (0, 1, 3, 7):
            if siblings == 0 and kind != "idle":
                continue
            say(f"  {siblings} {kind}")
            part.rows += _region_rows(siblings, kind, count, preload)


def _region_rows(siblings: int, kind: str, count: int, preload: bool) -> list[Row]:
    rows = []
    with _stage() as (_, people):
        holder = people.holder("driver")
        with people.siblings(siblings, kind, preload=preload):
            for work in (False, True):
                left = 5 if work else 0
                holder.measure("stream", 2, launches=0, hold_s=0.002, left=left)
                found = holder.measure("stream", count, launches=0, hold_s=0.002, left=left)
                name = f"{siblings} {kind}{', work' if work else ''}"
                aim = 0.5 if (siblings, kind, work) == (7, "idle", False) else None
                rows.append(_region_row(name, found, aim))
        crew.end(holder.process)
    return rows


def _region_row(name: str, found: list[dict[str, Any]], aim: float | None) -> Row:
    values: dict[str, float] = {}
    for end in ("enter", "exit"):
        times = [1e3 * it[f"{end}_s"] for it in found]
        values |= {end: percentile(times, 0.5), f"{end} p95": percentile(times, 0.95)}
    for step in _STEPS:
        short = step.removesuffix("_at_exit")
        values[short] = percentile([1e3 * it[f"{step}_s"] for it in found], 0.5)
    verdicts = Counter(it["verdict"] for it in found)
    note = ", ".join(f"{verdict} {times}" for verdict, times in verdicts.items())
    return Row(name, "ms", values, len(found), aim, note)


PARTS: dict[str, Callable[[bool], Part]] = {
    "overhead": overhead,
    "torch": torch_calls,
    "regions": regions,
    "locked": locked,
}
# The others are asked for by name.
DEFAULT_PARTS = ("overhead", "torch", "regions")


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu.sh", description="Measure krex on the first GPU.")
    parser.add_argument("--only", metavar="PART,…", help=f"of: {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: one minute")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench-gpu.json")
    parser.add_argument("--gpu", default="", help="a description of the GPU and its driver")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else DEFAULT_PARTS
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as with Ctrl-C
    described = machine.describe()
    print(f"{machine.in_words(described)}; {arguments.gpu or 'GPU not described'}")
    parts, failed = [], []
    for name in names:
        say(f"{name} …")
        started = time.monotonic()
        try:
            part = PARTS[name](arguments.quick)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            # The other parts are still worth having.
            say(f"{name} failed: {error}")
            failed.append(name)
            continue
        say(f"{name}: {time.monotonic() - started:.0f} s")
        print("\n" + "\n".join(lines(part)), flush=True)
        parts.append(part.to_dict())
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        data = {"machine": described, "gpu": arguments.gpu, "parts": parts, "failed": failed}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    print(f"\nwritten to {arguments.json}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
