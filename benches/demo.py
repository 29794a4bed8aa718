"""The main job of krex, shown: evaluation commands on a shared machine, and their timings.

Eight evaluation commands, as an AI coding agent would start them: each imports numpy, builds its
inputs, checks its kernel against float64, warms it up and times it. They run in three policies:

solo      one at a time: the ceiling for timings, and the reference that they are compared with
ungated   eight at once, nothing between them
regions   eight at once, each under `krex run`, warm-up and timed loop in `krex.region.critical()`

The policies take turns, so that a drift of the machine hits all three. Everything happens in a
runtime directory of its own, which is removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# --- one evaluation command ---

# A repeat is one timed loop of several calls, as long as agents' timed loops are: longer than a
# slice of the scheduler, so that whoever shares the core shows.
REPEATS = 5
REPEAT_S = 0.008
KINDS = ("memory", "compute", "loop")

Kernel = Callable[[], Any]


def build(kind: str) -> tuple[Kernel, Callable[[], float]]:
    """The kernel, and what finds its largest relative error against float64."""
    import numpy as np

    # Stands in for a compiler: a few tenths of a second of one CPU.
    source = "\n".join(f"def kernel_{i}(x, y):\n    return x * {i} + y[{i}]" for i in range(8000))
    compile(source, "<generated>", "exec")

    generator = np.random.default_rng(1)
    if kind == "memory":  # one pass over 48 MB: more than most caches keep
        a, b = (generator.random(4_000_000, dtype=np.float32) for _ in range(2))
        out = np.empty_like(a)

        def memory() -> Any:
            return np.add(a, b, out=out)

        return memory, lambda: _error(memory(), a.astype(np.float64) + b)
    if kind == "compute":  # fits into the second-level cache
        left, right = (generator.random((192, 192), dtype=np.float32) for _ in range(2))
        product = np.empty_like(left)

        def compute() -> Any:
            return np.matmul(left, right, out=product)

        return compute, lambda: _error(compute(), left.astype(np.float64) @ right)
    small = generator.random(64, dtype=np.float32)  # the interpreter takes most of the time

    def loop() -> Any:
        total = small
        for _ in range(200):
            total = total * np.float32(0.5) + small
        return total

    def reference() -> Any:
        total = small.astype(np.float64)
        for _ in range(200):
            total = total * 0.5 + small
        return total

    return loop, lambda: _error(loop(), reference())


def _error(found: Any, expected: Any) -> float:
    return float((abs(found - expected) / abs(expected)).max())


def time_kernel(kernel: Kernel) -> float:
    """Milliseconds per call: the median of the repeats, after a warm-up."""
    clock = time.perf_counter
    calls = 0
    start = clock()
    while clock() < start + REPEAT_S:
        kernel()
        calls += 1
    # The fastest of three, so that a pause in the warm-up does not shorten the repeats.
    one = min(_time_calls(kernel, 1) for _ in range(3))
    calls = max(1, calls, round(REPEAT_S / one))
    return 1e3 * statistics.median(_time_calls(kernel, calls) for _ in range(REPEATS))


def _time_calls(kernel: Kernel, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        kernel()
    return (time.perf_counter() - start) / calls


def evaluate(kind: str, in_region: bool) -> None:
    """The body of an evaluation command: prints its result as a line of JSON."""
    kernel, find_error = build(kind)
    error = find_error()
    if not error < 1e-4:
        sys.exit(f"the {kind} kernel is wrong: relative error {error:.3g}")
    result: dict[str, Any] = {"kind": kind}
    if in_region:
        import krex.region

        with krex.region.critical(label=kind) as region:
            result["ms"] = time_kernel(kernel)
        result["verdict"] = region.report.verdict
        result["reasons"] = region.report.reasons
        result["entry_ms"] = 1e3 * (region.report.drain_s + region.report.freeze_s)
    else:
        result["ms"] = time_kernel(kernel)
    print(json.dumps(result))


# --- many of them ---


@dataclass
class Policy:
    """A way to run the commands, and what came of it."""

    name: str
    width: int
    in_region: bool = False
    seconds: float = 0.0
    results: list[dict[str, Any]] = field(default_factory=list)

    @property
    def per_minute(self) -> float:
        return 60 * len(self.results) / self.seconds

    def timings(self, kind: str) -> list[float]:
        return [it["ms"] for it in self.results if it["kind"] == kind]


class CommandFailedError(Exception):
    """An evaluation command ended with an error."""


class Demo:
    """Runs the commands of all policies, in a runtime directory of its own."""

    def __init__(self, runtime_dir: str, cpus: set[int]) -> None:
        self.cpus = cpus
        self.krex = os.path.join(sysconfig.get_path("scripts"), "krex")
        self.environment = {
            **os.environ,
            "KREX_RUNTIME_DIR": runtime_dir,
            # One thread each: what is to be seen is commands beside commands.
            **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        }
        self.running: list[subprocess.Popen[str]] = []

    def start(self, kind: str, in_region: bool) -> None:
        command = [sys.executable, __file__, "--evaluate", kind]
        if in_region:
            command = [self.krex, "run", "--name", kind, "--", *command, "--in-region"]
        self.running.append(
            subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                # Ctrl-C is the demo's alone: it ends its commands itself.
                start_new_session=True,
            )
        )

    def finished(self) -> Iterator[dict[str, Any]]:
        """Wait until a command has ended; the results of all that have."""
        while not (ended := [it for it in self.running if it.poll() is not None]):
            time.sleep(0.002)
        for process in ended:
            self.running.remove(process)
            output, complaint = process.communicate()
            if process.returncode != 0:
                words = " ".join(str(it) for it in process.args)  # type: ignore[union-attr]
                last = complaint.strip().rpartition("\n")[2]
                raise CommandFailedError(f"`{words}` ended with {process.returncode}: {last}")
            result: dict[str, Any] = json.loads(output)
            yield result

    def run(self, policy: Policy, kinds: Sequence[str]) -> None:
        """Run one command per kind named, as many at once as the policy says."""
        waiting = list(kinds)
        started = time.perf_counter()
        while waiting or self.running:
            while waiting and len(self.running) < policy.width:
                self.start(waiting.pop(0), policy.in_region)
            policy.results.extend(self.finished())
        policy.seconds += time.perf_counter() - started

    def close(self) -> None:
        """End what runs, and take krex out of the runtime directory."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not cut this off
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self.running:
            process.communicate()
        subprocess.run(
            [self.krex, "recover", "--purge"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            start_new_session=True,
        )


def is_close(ms: float, reference: float) -> bool:
    return abs(ms / reference - 1) <= 0.05


def table(policies: Sequence[Policy]) -> list[str]:
    """The lines of the result."""
    references = {kind: statistics.median(policies[0].timings(kind)) for kind in KINDS}
    kinds = "".join(f"{kind:>10}" for kind in KINDS)
    lines = [
        "                 commands      timings within 5% of solo's median         median",
        f"policy         per minute       all{kinds}      inflation",
    ]
    for policy in policies:
        close = {
            kind: [is_close(ms, references[kind]) for ms in policy.timings(kind)] for kind in KINDS
        }
        ratios = [it["ms"] / references[it["kind"]] for it in policy.results]
        every = [it for some in close.values() for it in some]
        shares = [statistics.mean(some) for some in (every, *close.values())]
        lines.append(
            f"{policy.name:<12}{policy.per_minute:>13.0f}"
            + "".join(f"{share:>10.0%}" for share in shares)
            + f"{statistics.median(ratios):>14.2f}x"
        )
    return lines


def share_close(policy: Policy, solo: Policy) -> float:
    references = {kind: statistics.median(solo.timings(kind)) for kind in KINDS}
    return statistics.mean(is_close(it["ms"], references[it["kind"]]) for it in policy.results)


def show(policies: Sequence[Policy], cpus: set[int]) -> None:
    solo, ungated, regions = policies
    print("\n".join(table(policies)))
    references = ", ".join(
        f"{kind} {statistics.median(solo.timings(kind)):.3g} ms" for kind in KINDS
    )
    verdicts = Counter(it["verdict"] for it in regions.results)
    entries = statistics.median(it["entry_ms"] for it in regions.results)
    gain = 100 * (share_close(regions, solo) - share_close(ungated, solo))
    print(
        f"\nregions are {gain:+.0f} points above ungated; "
        f"solo's own repeatability is the ceiling"
        f"\nsolo's medians, per call: {references}"
        f"\nverdicts of the regions: "
        + ", ".join(f"{verdict} {count}" for verdict, count in sorted(verdicts.items()))
        + f"; entering took {entries:.2g} ms (median)"
        f"\n{len(solo.results)} commands per policy on {len(cpus)} CPUs, "
        f"at most {ungated.width} at once, numpy pinned to one thread each"
    )
    if share_close(solo, solo) < 0.6:
        print(
            "solo itself repeats poorly: something else disturbs this machine, so that none of "
            "this says much"
        )
    for reason, count in Counter(
        reason for it in regions.results for reason in it["reasons"]
    ).most_common(3):
        print(f"  {count} x {reason}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_all(arguments: argparse.Namespace) -> int:
    cpus = set(sorted(os.sched_getaffinity(0))[: arguments.cpus])
    os.sched_setaffinity(0, cpus)
    load = os.getloadavg()[0]
    if load > 0.5 * len(os.sched_getaffinity(0)):
        say(f"note: something else runs here (load {load:.1f}); it disturbs all three policies")
    policies = [
        Policy("solo", 1),
        Policy("ungated", arguments.width),
        Policy("regions", arguments.width, in_region=True),
    ]
    kinds = [KINDS[index % len(KINDS)] for index in range(arguments.width)]
    runtime_dir = tempfile.mkdtemp(prefix="krex-demo-", dir="/dev/shm")
    demo = Demo(runtime_dir, cpus)
    try:
        for number in range(1, arguments.rounds + 1):
            for policy in policies:
                say(
                    f"round {number} of {arguments.rounds}: {len(kinds)} commands, "
                    f"{policy.name} ({policy.width} at once)"
                )
                demo.run(policy, kinds)
    except KeyboardInterrupt:
        say("interrupted: ending the commands")
        return 130
    except CommandFailedError as error:
        say(f"demo: {error}")
        return 1
    finally:
        demo.close()
        shutil.rmtree(runtime_dir, ignore_errors=True)
    if arguments.json:
        print(json.dumps([vars(policy) for policy in policies]))
    else:
        show(policies, cpus)
    return 0


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as with Ctrl-C
    parser = argparse.ArgumentParser(
        description="Show evaluation commands solo, ungated and with regions, as a table."
    )
    parser.add_argument("--rounds", type=int, default=6, help="turns per policy (default: 6)")
    parser.add_argument("--width", type=int, default=8, help="commands at once (default: 8)")
    parser.add_argument(
        "--cpus",
        type=int,
        default=2,
        help="CPUs that all of them share (default: 2), so that it is crowded on any machine",
    )
    parser.add_argument("--json", action="store_true", help="print every result as JSON")
    parser.add_argument("--evaluate", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--in-region", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.evaluate:
        evaluate(arguments.evaluate, arguments.in_region)
        return 0
    if min(arguments.rounds, arguments.width, arguments.cpus) < 1:
        parser.error("rounds, width and cpus are at least 1")
    return run_all(arguments)


if __name__ == "__main__":
    sys.exit(main())
