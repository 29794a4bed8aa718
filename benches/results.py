"""Numbers, and how they are shown."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from krex.bench.machine import busy_share
from krex.bench.statistics import percentile as percentile_or_none


@dataclass(frozen=True)
class Row:
    """One thing measured: its values by name (median, p95, …), all in the same unit."""

    what: str
    unit: str
    values: dict[str, float]
    samples: int
    #: What DESIGN aims at for the first value; None: no aim.
    aim: float | None = None
    note: str = ""


@dataclass
class Part:
    """A table."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all values lie; there has to be one."""
    found = percentile_or_none(values, share)
    if found is None:
        raise ValueError("nothing was measured")
    return found


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Median, p95, p99 and maximum, times `scale`."""
    shares = {"median": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: scale * percentile(values, share) for name, share in shares.items()}


def _digits(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def lines(part: Part) -> list[str]:
    """A part as a table of text."""
    columns: list[str] = []
    for row in part.rows:
        columns += [name for name in row.values if name not in columns]
    width = max([len(row.what) for row in part.rows], default=0)
    head = f"{'':<{width}}" + "".join(f"{name:>11}" for name in columns)
    table = [part.title, "", head + "  unit  samples  aim"]
    for row in part.rows:
        cells = [_digits(row.values[name]) if name in row.values else "" for name in columns]
        aim = ""
        if row.aim is not None:
            met = next(iter(row.values.values())) <= row.aim
            aim = f"{row.aim:g} {'met' if met else 'MISSED'}"
        table.append(
            f"{row.what:<{width}}"
            + "".join(f"{cell:>11}" for cell in cells)
            + f"  {row.unit:<4}  {row.samples:>7}  {aim}  {row.note}".rstrip()
        )
    return table + [f"  {note}" for note in part.notes]


def wait_until_quiet(patience: float) -> float:
    """Wait until the machine is idle, `patience` seconds at most; the busy share seen last."""
    deadline = time.monotonic() + patience
    while True:
        share = busy_share()
        if share < 0.05 or time.monotonic() > deadline:
            return share
        time.sleep(1)
