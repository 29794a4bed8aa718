"""The built-in evaluation commands, one per kind of kernel.

Each is a whole one, as an AI coding agent would start it: it imports numpy, builds, checks its
kernel against float64, warms it up and times it. There are three kinds of kernels:

memory    adds two arrays in the second-level cache, so that loads and stores bound it
compute   multiplies two matrices in the second-level cache
launch    a Python loop over small arrays, in which the interpreter takes most of the time, as
          launches do for small GPU kernels

None of them depends on main memory: in a virtual machine its speed is the host's other guests'
affair, too, and a suite whose timings do not repeat even alone shows nothing about sharing.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from krex.bench.marker import region

# A repeat is one timed loop of several calls, as long as agents' timed loops are: longer than a
# slice of the scheduler, so that whoever shares the core shows. So many of them, that one or two
# disturbed from outside of the machine do not change the median.
REPEATS = 11
REPEAT_S = 0.008
WARM_UP_S = 0.02
LARGEST_ERROR = 1e-4

Kernel = Callable[[], Any]


def build(kind: str) -> tuple[Kernel, Callable[[], float]]:
    """Return the kernel, and what finds its largest relative error against float64."""
    import numpy as np

    # Stands in for a compiler: a few tenths of a second of one CPU.
    source = "\n".join(f"def kernel_{i}(x, y):\n    return x * {i} + y[{i}]" for i in range(8000))
    compile(source, "<generated>", "exec")

    generator = np.random.default_rng(1)
    if kind == "memory":
        # 120 kB in all: more than the first level has, and so little of the second that it does
        # not matter which pages a process gets. Alone, on two virtual cores, 144 MB came within
        # 5% of their median in 40 to 70% of runs; 6 MB, in the third level, in 70%.
        a, b = (generator.random(10_000, dtype=np.float32) for _ in range(2))
        out = np.empty_like(a)

        def memory() -> Any:
            return np.add(a, b, out=out)

        return memory, lambda: _error(memory(), a.astype(np.float64) + b)
    if kind == "compute":
        left, right = (generator.random((192, 192), dtype=np.float32) for _ in range(2))
        product = np.empty_like(left)

        def compute() -> Any:
            return np.matmul(left, right, out=product)

        return compute, lambda: _error(compute(), left.astype(np.float64) @ right)
    if kind == "launch":
        small = generator.random(64, dtype=np.float32)

        def launch() -> Any:
            total = small
            for _ in range(200):
                total = total * np.float32(0.5) + small
            return total

        def reference() -> Any:
            total = small.astype(np.float64)
            for _ in range(200):
                total = total * 0.5 + small
            return total

        return launch, lambda: _error(launch(), reference())
    raise ValueError(f"unknown kind {kind!r}")


def _error(found: Any, expected: Any) -> float:
    return float((abs(found - expected) / abs(expected)).max())


def time_kernel(kernel: Kernel) -> float:
    """Return milliseconds per call: the median of the repeats, after a warm-up."""
    end = time.perf_counter() + WARM_UP_S
    one = _time_calls(kernel, 1)
    while time.perf_counter() < end:
        # The fastest, so that a pause in the warm-up does not shorten the repeats.
        one = min(one, _time_calls(kernel, 1))
    calls = max(1, round(REPEAT_S / one))
    return 1e3 * statistics.median(_time_calls(kernel, calls) for _ in range(REPEATS))


def _time_calls(kernel: Kernel, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        kernel()
    return (time.perf_counter() - start) / calls


def main() -> None:
    """Be the evaluation command of the kind that the command line names."""
    kind = sys.argv[1]
    kernel, find_error = build(kind)
    error = find_error()
    if not error < LARGEST_ERROR:
        sys.exit(f"the {kind} kernel is wrong: relative error {error:.3g}")
    gc.disable()  # nothing but the kernel in the timed loop
    with region(kind) as timed:
        ms = time_kernel(kernel)
    print(json.dumps({"kind": kind, "ms": ms, **timed.to_dict()}))
