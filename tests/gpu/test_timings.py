"""A holder's timings beside siblings that load the GPU, against those that it has alone.

On a real GPU each has to be within 2% of solo in the median; the simulated one shows that the
tests themselves work. The tables are printed at the end of the run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from gpu.crew import Holder
from gpu.kernels import TORCH_KERNELS
from gpu_stage import IS_REAL, Gpu, Results, make_gpu
from krex.bench.statistics import median, percentile, share_within

pytestmark = [pytest.mark.timeout(400)] + ([pytest.mark.gpu] if IS_REAL else [])

KERNELS = TORCH_KERNELS if IS_REAL else ("stream",)
REGIONS = int(os.environ.get("KREX_GPU_REGIONS", "30" if IS_REAL else "5"))
LAUNCHES = 50 if IS_REAL else 20
WARM_UP_S = 0.05 if IS_REAL else 0.005
TOLERANCE = 0.02


@dataclass
class Stage:
    """A holder, and what its kernels take while nobody else is there."""

    gpu: Gpu
    holder: Holder
    results: Results
    solo: dict[str, float] = field(default_factory=dict)

    def measure(self, condition: str, *, region: bool = True) -> dict[str, dict[str, Any]]:
        """Measure all kernels, and add a line per kernel to the table."""
        rows = {}
        for kernel in KERNELS:
            found = self.holder.measure(
                kernel, REGIONS, region=region, launches=LAUNCHES, warm_up_s=WARM_UP_S
            )
            times = [it["ms"] for it in found]
            middle = median(times) or 0.0
            solo = self.solo.setdefault(kernel, middle)
            ratios = [it / solo for it in times]
            row = {
                "kernel": kernel,
                "condition": condition,
                "samples": len(times),
                "median ms": middle,
                "ratio": middle / solo,
                "p95": percentile(ratios, 0.95),
                "max": max(ratios),
                "within 2%": share_within(ratios, 0.02),
                "5%": share_within(ratios, 0.05),
                "enter ms": 1e3 * (median([it["enter_s"] for it in found]) or 0.0),
                "drain ms": 1e3 * (median([it.get("drain_s", 0.0) for it in found]) or 0.0),
                "freeze ms": 1e3 * (median([it.get("freeze_s", 0.0) for it in found]) or 0.0),
                "verdicts": dict(Counter(it["verdict"] for it in found if "verdict" in it)),
                "reasons": sorted({text for it in found for text in it.get("reasons", [])}),
            }
            self.results.add(**row)
            rows[kernel] = row | {"found": found}
        return rows

    def judge(self, condition: str, verdicts: Sequence[str] = ("clean",)) -> list[dict[str, Any]]:
        """Measure in regions, of which each has to be what it is alone; returns what they gave."""
        rows = self.measure(condition)
        for kernel, row in rows.items():
            told = {key: value for key, value in row.items() if key != "found"}
            assert set(row["verdicts"]) <= set(verdicts), told
            assert all(set(it["submissions"]) <= {0} for it in row["found"]), told
            if IS_REAL:
                assert row["median ms"] > 0.020, f"{kernel} is too short to be judged"
                assert abs(row["ratio"] - 1) <= TOLERANCE, told
                # What krex vouches for has to be right.
                clean = [it["ms"] for it in row["found"] if it["verdict"] == "clean"]
                share = share_within([it / self.solo[kernel] for it in clean], 0.05)
                assert share is None or share >= 0.95, told
        return [found for row in rows.values() for found in row["found"]]


@pytest.fixture(scope="module")
def stage(results: Results) -> Iterator[Stage]:
    with make_gpu() as gpu:
        holder = gpu.crew.holder("torch" if IS_REAL else "driver")
        made = Stage(gpu, holder, results)
        made.measure("solo", region=False)
        made.measure("solo, in regions")
        yield made
        # What was killed last is gone by then.
        time.sleep(1)
        with contextlib.suppress(RuntimeError):
            made.measure("solo again", region=False)


@pytest.mark.parametrize("count", [3, 7])
def test_beside_saturating_siblings(stage: Stage, count: int) -> None:
    with stage.gpu.crew.siblings(count, "saturate"):
        ungated = stage.measure(f"{count} saturating, ungated", region=False)
        # Otherwise nothing is shown.
        assert all(row["ratio"] > 1.3 for row in ungated.values())
        stage.judge(f"{count} saturating, krex")


def test_a_busy_sibling_is_drained(stage: Stage) -> None:
    """The region begins while a sibling has tens of milliseconds of work outstanding."""
    with stage.gpu.crew.siblings(1, "flood"):
        stage.measure("1 flooding, ungated", region=False)
        regions = stage.judge("1 flooding, krex")
        outcomes = [it for found in regions for it in found["drained"]]
        assert "streams" in outcomes
        assert set(outcomes) <= {"streams", "idle"}


def test_beside_idle_siblings(stage: Stage) -> None:
    with stage.gpu.crew.siblings(3, "idle"):
        stage.judge("3 idle, krex")


def test_beside_births(stage: Stage) -> None:
    """Four siblings do nothing but start, make a context, and exit."""
    with stage.gpu.crew.births(4) as done:
        stage.measure("4 births, ungated", region=False)
        before = len(done)
        # What has just been started may not have loaded the interposer yet.
        stage.judge("4 births, krex", ("clean", "unknown"))
        assert len(done) > before or not IS_REAL
    assert set(done) == {0}


def test_beside_contexts(stage: Stage) -> None:
    """Two siblings make and destroy their context, over and over."""
    with stage.gpu.crew.siblings(2, "contexts"):
        stage.measure("2 making contexts, ungated", region=False)
        stage.judge("2 making contexts, krex")


def test_while_siblings_are_killed(stage: Stage) -> None:
    """Siblings are killed with work outstanding, and replaced."""
    with stage.gpu.crew.killed(2) as done:
        stage.measure("2 killed, ungated", region=False)
        before = len(done)
        # One that is killed within the region is torn down within it: nobody can prevent that.
        stage.judge("2 killed, krex", ("clean", "unknown", "contended"))
        # On the simulated GPU regions are over before the next one is there.
        assert len(done) > before or not IS_REAL
    assert set(done) == {-9}
