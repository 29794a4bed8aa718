"""A process that times kernels, in regions or without, as lines on standard input tell it to.

Each line is a JSON object with `kernel`, `count` (regions), `region` (true or false),
`launches`, `warm_up_s`, `hold_s` and `left`; the answer is a line with a list of what each gave.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from gpu import kernels

_STEPS = (
    "wait_s",
    "drain_s",
    "freeze_s",
    "isolate_s",
    "held_s",
    "pending_at_exit_s",
    "restore_s",
)


def main() -> None:
    """Be the holder; the word says whether its kernels are torch's."""
    clock, launchers = kernels.with_torch() if sys.argv[1] == "torch" else kernels.with_driver()
    gc.disable()  # nothing but the kernel in the timed loop
    print("ready", flush=True)
    for line in sys.stdin:
        orders = json.loads(line)
        count = orders.pop("count")
        launch = launchers[orders.pop("kernel")]
        found = [_once(clock, launch, **orders) for _ in range(count)]
        print(json.dumps(found), flush=True)


def _once(
    clock: kernels.Clock,
    launch: Callable[[], object],
    *,
    region: bool,
    launches: int,
    warm_up_s: float,
    hold_s: float = 0.0,
    left: int = 0,
) -> dict[str, Any]:
    """Time a kernel once, or, without `launches`, stay inside for `hold_s`.

    Then launch it `left` times without waiting for it.
    """
    from krex.region import critical

    section = critical(timeout=60, drain_timeout=10, label="gpu") if region else nullcontext()
    ms = None
    before = time.perf_counter()
    with section:
        entered = time.perf_counter()
        if launches:
            kernels.warm_up(clock, launch, warm_up_s)
            ms = clock.time(launch, launches)
        else:
            time.sleep(hold_s)
        for _ in range(left):
            launch()
        leaving = time.perf_counter()
    after = time.perf_counter()
    found: dict[str, Any] = {"ms": ms, "enter_s": entered - before, "exit_s": after - leaving}
    if isinstance(section, critical):
        report = section.report
        found.update({name: getattr(report, name) for name in _STEPS})
        found.update(
            verdict=report.verdict,
            reasons=list(report.reasons),
            device=report.device,
            freezer=report.freezer,
            drained=[it.drained for it in report.siblings],
            submissions=[it.submissions for it in report.siblings],
        )
    # Work outside of regions gets its turn.
    time.sleep(max(0.01, (after - before) / 2))
    return found
