"""``krex bench gate``: what krex itself costs on this machine, beside other locks."""

from __future__ import annotations

import fcntl
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise, repeat
from typing import Any

from krex._text import table
from krex.bench import machine
from krex.bench.errors import BenchError
from krex.bench.gate_stage import Interrupted, Stage
from krex.bench.interruption import Interruption
from krex.bench.progress import Progress
from krex.bench.results import reserved, save_or_rescue
from krex.bench.statistics import percentile

# One `with` statement takes a microsecond or two, so many cost nothing.
_PAIRS = 20_000
# Those without the interpreter take nanoseconds, and are timed in bulk.
_ROUNDS = 51
_PASSES = 50_000
_NATIVE = {
    "floor": "two atomic additions, the floor",
    "pass": "gate: enter and leave",
    "look_and_pass": "gate: look, enter and leave",
    "semaphore": "POSIX semaphore",
    "flock": "flock, exclusive",
}
# Regions of each of two rivals, one after the other: so few that Ctrl-C is seen soon.
_TURNS = 10
_PERCENTILES = {"median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class Row:
    """One thing measured."""

    what: str
    unit: str
    samples: int
    median: float
    p95: float
    p99: float
    max: float
    note: str = ""


def show(siblings: int, repeats: int, path: str | None) -> int:
    """Measure, print a table, and write JSON to `path` if there is one; returns the status.

    Raises:
        BenchUsageError, OSError: if `path` cannot be written.
        BenchError: if the processes that are measured do not do their part.
    """
    with nullcontext() if path is None else reserved(path):
        return _show(siblings, repeats, path)


def _show(siblings: int, repeats: int, path: str | None) -> int:
    from krex import __version__

    described = machine.describe()
    busy = machine.busy_share()
    progress = Progress(0)
    if busy >= 0.05:
        progress.say(f"krex: other processes use {busy:.0%} of the CPUs, which shows in the tails")
    with Interruption() as interruption:
        try:
            rows = measure(siblings, repeats, interruption)
        except Interrupted:
            interruption.pass_on()
            raise
    trouble = None
    if path is not None:
        data = {
            "krex_version": __version__,
            "machine": described,
            "busy_before": round(busy, 3),
            "rows": [asdict(row) for row in rows],
        }
        trouble = save_or_rescue(path, data)
    print(f"krex {__version__} on {machine.in_words(described)}\n")
    print("\n".join(lines(rows)), flush=True)
    interruption.pass_on()
    if trouble is not None:
        raise BenchError(trouble)
    return 0


def measure(siblings: int, repeats: int, interruption: Interruption) -> list[Row]:
    """Return one row per thing.

    Raises:
        Interrupted: if a signal asked the process to end.
        BenchError: if the processes that are measured do not do their part.
    """
    rows = _native_pairs(_ROUNDS)
    with Stage(interruption) as stage:
        rows += _pairs(stage, _PAIRS)
    if siblings == 0:
        return rows
    with Stage(interruption) as stage:
        stage.add_siblings(siblings)
        stage.time_regions(3)  # warm-up
        rows += _beside(stage, siblings, repeats)
        rows.append(_hand_over(stage, repeats))
        times = [stage.recover() for _ in range(repeats)]
        rows.append(_row("SIGKILL of a holder, until they run again", "ms", times, 1e-6))
    return rows


def _native_pairs(rounds: int) -> list[Row]:
    """The bare things, with nobody else there: CPU time of one pair."""
    from krex._krex import time_open_gate

    found = [time_open_gate(_PASSES) for _ in range(rounds)]
    note = f"CPU time, means of {_PASSES:,}"
    return [
        _row(what, "ns", [it[name] for it in found], 1.0, note) for name, what in _NATIVE.items()
    ]


def _pairs(stage: Stage, count: int) -> list[Row]:
    """Entering and leaving from Python, with nobody else there."""
    from krex import submission
    from krex.region import critical

    with stage.as_own(), tempfile.TemporaryFile() as file:
        # Made once; `next` of a repetition is the cheapest call there is.
        nothing = repeat(nullcontext()).__next__
        flock = repeat(_Flock(file.fileno())).__next__
        semaphore = repeat(multiprocessing.Lock()).__next__
        subjects: list[tuple[str, Callable[[], AbstractContextManager[Any]]]] = [
            ("nothing (contextlib.nullcontext)", nothing),
            ("gate: krex.submission()", submission),
            ("region: critical(), alone", critical),
            ("flock, exclusive", flock),
            ("POSIX semaphore (multiprocessing.Lock)", semaphore),
        ]
        return [
            _row(what, "us", _time_pairs(make, count), 1e-3, "one `with` statement")
            for what, make in subjects
        ]


def _time_pairs(make: Callable[[], AbstractContextManager[Any]], count: int) -> list[int]:
    clock = time.perf_counter_ns
    with make():  # whatever is done once
        pass
    times = []
    for _ in range(count):
        start = clock()
        with make():
            pass
        times.append(clock() - start)
    return times


class _Flock:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def _beside(stage: Stage, siblings: int, repeats: int) -> list[Row]:
    found: list[dict[str, Any]] = []
    while len(found) < repeats:  # in parts, between which Ctrl-C is seen
        found += stage.time_regions(min(10, repeats - len(found)))
    verdicts = Counter(it["verdict"] for it in found)
    told = ", ".join(f"{name} {count}" for name, count in sorted(verdicts.items()))
    beside = f"beside {siblings} idle sibling{'s' if siblings != 1 else ''}"
    return [
        _row(f"region {beside}: enter", "ms", [it["enter"] for it in found], 1e3, told),
        _row(f"region {beside}: leave", "ms", [it["leave"] for it in found], 1e3),
        _row("  from leaving until nobody is frozen", "ms", [it["thawed"] for it in found], 1e3),
    ]


def _hand_over(stage: Stage, repeats: int) -> Row:
    """From a holder's beginning to leave until the one that waited has entered."""
    times: list[int] = []
    for _ in range(10 + repeats):
        started = time.monotonic()
        turns = sorted(
            ((*turn, rival) for rival, one in enumerate(stage.time_rivals(_TURNS)) for turn in one),
            key=lambda turn: turn[1],
        )
        times += [
            later[1] - earlier[2]
            for earlier, later in pairwise(turns)
            if later[3] != earlier[3] and later[0] < earlier[2]
        ]
        if len(times) >= repeats:
            break
        # The gate has to be open for a quarter of the time, or it is in the end kept open.
        time.sleep((time.monotonic() - started) / 2)
    if not times:
        raise BenchError("two processes that ask for regions never waited for each other")
    note = "from beginning to leave until the next one is inside"
    return _row("region handed over to one that waits", "ms", times[:repeats], 1e-6, note)


def _row(what: str, unit: str, times: list[Any], scale: float, note: str = "") -> Row:
    values = {
        name: (percentile(times, share) or 0.0) * scale for name, share in _PERCENTILES.items()
    }
    return Row(what, unit, len(times), **values, note=note)


def lines(rows: list[Row]) -> list[str]:
    """Return the rows as an aligned table."""
    header = ["", *_PERCENTILES, "unit", "samples", ""]
    cells = []
    for row in rows:
        values = [f"{getattr(row, name):.3g}" for name in _PERCENTILES]
        cells.append([row.what, *values, row.unit, str(row.samples), row.note])
    return table(header, cells)
