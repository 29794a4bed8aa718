"""What is measured: one function per table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import Part, Row, percentile, spread
from stage import KREX, Pulse, Stage, wait_until

ROOT = Path(__file__).resolve().parent.parent
FREEZERS = ("cgroup2", "sigstop")
HOGS = 32
SIBLING_THREADS = 20


def gate(quick: bool) -> Part:
    """An open gate, through the real code: the Rust program open_gate.rs."""
    part = Part("gate", "Passing an open gate: CPU time per pass, enter and leave")
    command = [os.environ.get("CARGO", "cargo"), "bench", "--quiet", "--locked"]
    command += ["-p", "krex-core", "--bench", "open_gate", "--"]
    rounds = 5 if quick else 21
    output = subprocess.run(
        [*command, "--rounds", str(rounds)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    names = {
        "floor": "two atomic additions (the floor)",
        "pass": "pass",
        "look_and_pass": "pass, with a look first",
        "semaphore": "POSIX semaphore, one each",
        "flock": "flock, exclusive, a file each",
    }
    floor = 0.0
    for line in output.splitlines():
        found = json.loads(line)
        if found["kind"] == "floor":
            floor = found["ns"]
        threads = found["threads"]
        counters = "one counter" if found["shared"] else "a counter each"
        where = "1 thread" if threads == 1 else f"{threads} threads, {counters}"
        part.rows.append(
            Row(
                f"{where}: {names[found['kind']]}",
                "ns",
                {"median": found["ns"], "/ floor": found["ratio"]},
                rounds,
                round(1.2 * floor, 1) if "pass" in found["kind"] else None,
            )
        )
    part.notes.append("aim: 1.2 x the floor; `/ floor`: the median of the rounds' own ratios")
    return part


def entry(quick: bool) -> Part:
    """Entering and leaving beside siblings."""
    part = Part(
        "entry", f"Entry and exit beside siblings of {SIBLING_THREADS} threads each (medians; p95)"
    )
    turns = 4 if quick else 20
    for freezer in FREEZERS:
        for busy in (0, 1):
            for count in (1, 3, 7, 15):
                aim = 0.5 if busy == 0 and count == 7 and freezer == "cgroup2" else None
                part.rows.append(_entry_row(freezer, count, busy, turns, aim))
    part.rows.append(_entry_row("cgroup2", 7, SIBLING_THREADS - 1, turns, None))
    part.notes += ENTRY_NOTES
    return part


ENTRY_NOTES = [
    "entry, exit: the holder's own time in `__enter__` and `__exit__`",
    "freeze: of the entry, the drain and freeze; kernel: the same siblings frozen in the same run "
    "by bare writes to cgroup.freeze, until cgroup.events says so: the floor",
    "thawed: from the beginning of the exit until no tenant is frozen, as the holder sees it",
]


def _entry_row(
    freezer: str, count: int, busy: int, turns: int, aim: float | None, hogs: int = 0
) -> Row:
    each = 10
    results: list[dict[str, Any]] = []
    bare: list[float] = []
    with Stage(freezer) as stage:
        stage.siblings(count, SIBLING_THREADS, busy)
        groups = stage.groups() if freezer == "cgroup2" else None
        holder = stage.holder()
        stage.hogs(hogs)
        holder.measure(3, 0.002, 0.02)
        for _ in range(turns):
            results += holder.measure(each, 0.002, 0.02)
            if groups:
                bare += [groups.freeze_and_thaw(0.002, 0.02) for _ in range(each)]
    values = {}
    for key in ("entry", "exit", "thawed", "freeze"):
        times = [1e3 * it[key] for it in results]
        values[key] = percentile(times, 0.5)
        if key != "freeze":
            values[f"{key} p95"] = percentile(times, 0.95)
    if bare:
        values["kernel"] = 1e3 * percentile(bare, 0.5)
    doing = "idle" if busy == 0 else f"{busy} of {SIBLING_THREADS} threads busy"
    clean = sum(it["verdict"] == "clean" for it in results)
    note = "" if clean == len(results) else f"({clean} of {len(results)} clean)"
    return Row(f"{freezer}, {count} {doing}", "ms", values, len(results), aim, note)


def isolation(quick: bool) -> Part:
    """Reserved CPUs: what they add to entry and exit, nobody else there."""
    part = Part("isolation", "Entry and exit with reserved CPUs, nobody else there (medians)")
    cpus = sorted(os.sched_getaffinity(0))
    reserved = ",".join(map(str, cpus[-2:] if len(cpus) > 4 else cpus[-1:]))
    for freezer in FREEZERS:
        for setting in (reserved, "none"):
            for threads in (1, 20, 200):
                part.rows.append(_isolation_row(freezer, setting, threads, 50 if quick else 500))
    part.notes += [
        "isolate: of the entry, moving the holder's threads; exit has the way back",
        "threads are idle but for the one that enters",
    ]
    return part


def _isolation_row(freezer: str, setting: str, threads: int, repeats: int) -> Row:
    with Stage(freezer) as stage:
        stage.environment["KREX_RESERVED_CPUS"] = setting
        holder = stage.holder(threads)
        holder.measure(5, 0.0002, 0.002)
        results = holder.measure(repeats, 0.0002, 0.002)
    values = {
        f"{key}{name}": percentile([1e6 * it[key] for it in results], share)
        for key in ("entry", "isolate", "exit")
        for name, share in (("", 0.5), (" p95", 0.95))
    }
    what = f"{freezer}, CPUs {setting}, {threads} thread{'s' if threads > 1 else ''}"
    return Row(what, "us", values, len(results))


def recovery(quick: bool) -> Part:
    """SIGKILL, until frozen siblings run again."""
    part = Part("recovery", "From SIGKILL until the last of 3 frozen siblings runs again")
    for freezer in FREEZERS:
        part.rows += _recovery_rows(freezer, 20 if quick else 100, 5 if quick else 30)
    part.notes += RECOVERY_NOTES
    return part


def _recovery_rows(freezer: str, holders: int, supervisors: int, hogs: int = 0) -> list[Row]:
    aims = {"holder": 50.0}
    rows = []
    with Stage(freezer) as stage:
        pulses = stage.siblings(3, SIBLING_THREADS, pulses=True)
        stage.hogs(hogs)
        for victim, repeats in (
            ("holder", holders),
            ("worker", supervisors),
            ("keeper", supervisors),
        ):
            found = [_recover(stage, pulses, victim) for _ in range(repeats)]
            times = [total for total, _ in found]
            values = spread(times, 1e-6)
            if victim == "holder":
                values["gone"] = 1e-6 * percentile([gone for _, gone in found], 0.5)
            rows.append(
                Row(
                    f"{freezer}: SIGKILL of the {victim}",
                    "ms",
                    values,
                    len(times),
                    aims.get(victim),
                )
            )
    return rows


RECOVERY_NOTES = [
    "worker, keeper: the halves of the supervisor, killed just when the holder begins to leave",
    "by the siblings' own clocks: each notes when it ran, every 0.2 ms; gone: until the killed "
    "holder had ended, which is the kernel's part",
]


def _recover(stage: Stage, pulses: list[Pulse], victim: str) -> tuple[int, int]:
    """Nanoseconds from the kill until the last sibling ran, and until a holder was gone."""
    holder = stage.fork_holder()
    time.sleep(0.01)
    pair = stage.supervisor()
    moment = time.monotonic_ns()
    if victim == "holder":
        stage.kill(holder)
    else:
        os.kill(pair["worker_pid" if victim == "worker" else "pid"], signal.SIGKILL)
        stage.leave(holder)
    gone = time.monotonic_ns() - moment
    wait_until(lambda: all(it.pause_around(moment) for it in pulses), "the siblings run again")
    pauses = [it.pause_around(moment) for it in pulses]
    if victim != "holder":

        def is_replaced() -> bool:
            now = stage.supervisor()
            return any(now[half] != pair[half] for half in ("pid", "worker_pid"))

        wait_until(is_replaced, "the other half takes over")
        # A worker that ends within a second of its start counts as one that keeps failing. By
        # then the holder has left, too.
        time.sleep(1.1)
        stage.kill(holder)
    resumed = time.monotonic_ns()
    wait_until(lambda: all(it.last_beat() > resumed for it in pulses), "the siblings run")
    return max(pause[1] for pause in pauses if pause) - moment, gone


def entry_busy(quick: bool) -> Part:
    """Entering and leaving while the machine is crowded."""
    part = Part("entry-busy", f"Entry and exit beside {HOGS} busy processes that are not krex's")
    for freezer in FREEZERS:
        part.rows.append(_entry_row(freezer, 7, 0, 2 if quick else 10, None, HOGS))
    part.notes += ENTRY_NOTES
    return part


def recovery_busy(quick: bool) -> Part:
    """SIGKILL while the machine is crowded."""
    part = Part("recovery-busy", f"Recovery beside {HOGS} busy processes that are not krex's")
    for freezer in FREEZERS:
        part.rows += _recovery_rows(freezer, 5 if quick else 30, 3 if quick else 10, HOGS)
    part.notes += RECOVERY_NOTES
    return part


def scale(quick: bool) -> Part:
    """Many tenants; the supervisor's memory; what `krex run` adds to a command."""
    part = Part("scale", "Many tenants, memory, and the launcher")
    for count, aim in ((7, 0.34), (200, 5.8)):
        with Stage("cgroup2") as stage:
            for _ in range(count):
                stage.start([KREX, "run", "--", "sleep", "1000"])
            wait_until(
                lambda stage=stage, count=count: len(stage.status()["tenants"]) >= count,  # type: ignore[misc]
                "the tenants are there",
            )
            time.sleep(0.5)  # until every one of them has become `sleep`
            groups, holder = stage.groups(), stage.holder()
            freezes: list[float] = []
            bare: list[float] = []
            for _ in range(4 if quick else 20):
                freezes += [it["freeze"] for it in holder.measure(5, 0.002, 0.05)]
                bare += [groups.freeze_and_thaw(0.002, 0.05) for _ in range(5)]
            values = spread(freezes, 1e3) | {"kernel": 1e3 * percentile(bare, 0.5)}
            what = f"the last of {count} tenants of one thread frozen"
            part.rows.append(Row(what, "ms", values, len(freezes), aim))
            what = f"supervisor with {count + 1} tenants, both halves"
            part.rows.append(Row(what, "MB", _memory(stage.supervisor()), 1, 3.0))
    part.notes += [
        "kernel: the same groups frozen by bare writes, until cgroup.events says so, in turns",
        "memory is PSS; segment: of it, pages of the shared segment",
        "added by `krex run`: the difference of the medians of `true` with it and without",
    ]
    for freezer in FREEZERS:
        with Stage(freezer) as stage:
            stage.siblings(1, 1)  # keeps the supervisor up
            part.rows.append(_launch_row(stage, freezer, 50 if quick else 300))
    return part


def _memory(pair: dict[str, Any]) -> dict[str, float]:
    """Megabytes of both halves of a supervisor; what is shared with others counts in part."""
    total = segment = 0
    for pid in (pair["pid"], pair["worker_pid"]):
        mapping = ""
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            words = line.split()
            if words[0] == "Pss:":
                total += int(words[1])
                segment += int(words[1]) if mapping.endswith("/segment") else 0
            elif not words[0].endswith(":"):
                mapping = words[-1]
    return {"median": total * 1024 / 1e6, "segment": segment * 1024 / 1e6}


def _launch_row(stage: Stage, freezer: str, repeats: int) -> Row:
    def run(command: list[str]) -> float:
        start = time.perf_counter()
        subprocess.run(command, env=stage.environment, check=True)
        return time.perf_counter() - start

    plain, launched = [], []
    for _ in range(repeats):  # in turns
        plain.append(run(["true"]))
        launched.append(run([KREX, "run", "--", "true"]))
    values = {
        "median": 1e3 * (percentile(launched, 0.5) - percentile(plain, 0.5)),
        "plain": 1e3 * percentile(plain, 0.5),
        "krex run": 1e3 * percentile(launched, 0.5),
    }
    return Row(f"added by `krex run` to `true`, {freezer}", "ms", values, repeats)


PARTS: dict[str, Callable[[bool], Part]] = {
    "gate": gate,
    "entry": entry,
    "isolation": isolation,
    "recovery": recovery,
    "entry-busy": entry_busy,
    "recovery-busy": recovery_busy,
    "scale": scale,
}
