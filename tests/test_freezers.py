"""What every freezer must do: one suite, run on each through a supervisor."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from harness import (
    ACTOR,
    KREX,
    LIMIT,
    Actor,
    Machine,
    cgroup_mount,
    cgroup_of,
    is_frozen,
    is_running,
    process_state,
    wait_until,
)

# Counts up in many places of a shared file, a place for each task of it: threads of the main
# process, two children with threads, a grandchild, and one that forks and reaps without end.
WORKERS = """
import mmap, os, struct, sys, threading, time
file = open(sys.argv[1], "r+b")
memory = mmap.mmap(file.fileno(), 0)
def count(place):
    while True:
        value, = struct.unpack_from("q", memory, place * 8)
        struct.pack_into("q", memory, place * 8, value + 1)
        time.sleep(0.0005)
def threads(*places):
    for place in places:
        threading.Thread(target=count, args=(place,), daemon=True).start()
def child(body):
    pid = os.fork()
    if pid == 0:
        body()
        os._exit(0)
    return pid
def bear():
    while True:
        pid = os.fork()
        if pid == 0:
            value, = struct.unpack_from("q", memory, 7 * 8)
            struct.pack_into("q", memory, 7 * 8, value + 1)
            os._exit(0)
        os.waitpid(pid, 0)
def parent():
    child(lambda: count(6))
    count(5)
pids = [child(lambda: (threads(3), count(4))), child(parent), child(bear)]
threads(0, 1)
print(*pids, flush=True)
count(2)
"""
PLACES = 8


class Workers:
    """A tenant with many tasks, in a session of its own, and what each has counted."""

    def __init__(
        self, machine: Machine, directory: Path, before: Sequence[str] = (), code: str = WORKERS
    ) -> None:
        path = directory / "counts"
        path.write_bytes(bytes(8 * PLACES))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        # env looks where the interpreter is with all that its user may see.
        python = ["env", sys.executable] if before else [sys.executable]
        command = [*before, KREX, "run", "--name", "workers", "--", *python, "-c", code]
        self.process = machine.start(
            [*command, path], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdout is not None
        self.pids = [self.process.pid, *map(int, self.process.stdout.readline().split())]
        machine.pids |= set(self.pids)
        self.all_go_on()

    def counts(self) -> tuple[int, ...]:
        return struct.unpack(f"{PLACES}q", self.memory[:])

    def all_go_on(self) -> None:
        before = self.counts()
        wait_until(lambda: all(a > b for a, b in zip(self.counts(), before, strict=True)))

    def none_goes_on(self, holder: Actor) -> None:
        before = self.counts()
        holder.do("spin", seconds=0.15)
        assert self.counts() == before

    def kill(self) -> None:
        """End all of them, also those whose process ids nobody told us."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.memory.close()


@pytest.fixture
def workers(freezing_machine: Machine, tmp_path: Path) -> Iterator[Workers]:
    with Workers(freezing_machine, tmp_path) as workers:
        yield workers


@contextlib.contextmanager
def machine_with(freezer: str) -> Iterator[Machine]:
    machine = Machine(freezer)
    try:
        yield machine
    finally:
        machine.close()


def test_threads_children_and_new_borns_freeze_and_thaw(
    freezing_machine: Machine, workers: Workers
) -> None:
    holder = freezing_machine.actor()
    for _ in range(5):
        holder.do("hold")
        workers.none_goes_on(holder)
        report = holder.do("leave")
        assert report["verdict"] == "clean", report
        assert report["siblings"][0]["frozen"] == freezing_machine.freezer
        wait_until(freezing_machine.nobody_is_frozen)
        workers.all_go_on()


def test_quick_regions_lose_no_thaw(freezing_machine: Machine, workers: Workers) -> None:
    """Freezing and thawing one right after the other, many times."""
    holder = freezing_machine.actor()
    outcome = holder.call("many_regions", device="cpu", count=100)
    assert set(outcome["verdicts"]) == {"clean"}
    wait_until(freezing_machine.nobody_is_frozen)
    workers.all_go_on()


def test_sigkill_works_while_frozen(freezing_machine: Machine, workers: Workers) -> None:
    holder = freezing_machine.actor()
    holder.do("hold")
    holder.send("spin", seconds=1.0)
    assert all(is_frozen(pid) for pid in workers.pids)
    os.killpg(workers.process.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in workers.pids))
    assert freezing_machine.device()["phase"] == "held"
    assert workers.process.wait(LIMIT) == -signal.SIGKILL
    holder.answer()
    holder.do("leave_anyhow")
    wait_until(lambda: set(freezing_machine.tenants()) == {holder.pid})


def test_an_orphan_that_was_frozen_once_still_belongs(
    freezing_machine: Machine, workers: Workers
) -> None:
    """Its parents died while all were frozen: by its ancestry it is nobody's any more."""
    machine = freezing_machine
    parent = workers.pids[2]
    (orphan,) = map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    machine.pids.add(orphan)
    holder = machine.actor()
    holder.do("hold")
    assert is_frozen(orphan)
    holder.send("spin", seconds=0.3)
    for pid in workers.pids:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(is_running(pid) for pid in workers.pids))
    workers.process.wait(LIMIT)
    holder.answer()
    holder.do("leave_anyhow")
    wait_until(machine.nobody_is_frozen)
    holder.do("hold")
    assert is_frozen(orphan)
    holder.do("leave")
    wait_until(machine.nobody_is_frozen)
    assert is_running(orphan)


def test_what_others_stopped_stays_stopped(freezing_machine: Machine, workers: Workers) -> None:
    """Continued is only what krex stopped."""
    stopped, *running = workers.pids[1:]
    os.kill(stopped, signal.SIGSTOP)
    wait_until(lambda: process_state(stopped) == "T")
    holder = freezing_machine.actor()
    for _ in range(3):
        holder.do("hold")
        workers.none_goes_on(holder)
        report = holder.do("leave")
        assert report["verdict"] == "clean", report
        wait_until(lambda: not any(is_frozen(pid) for pid in running))
        assert process_state(stopped) == "T"
    os.kill(stopped, signal.SIGCONT)
    workers.all_go_on()


def test_one_that_others_continued_is_noticed(freezing_machine: Machine, workers: Workers) -> None:
    """An outsider's SIGCONT: harmless in a cgroup; under SIGSTOP the verdict names it."""
    holder = freezing_machine.actor()
    holder.do("hold")
    before = workers.counts()
    for pid in workers.pids:
        os.kill(pid, signal.SIGCONT)
    holder.do("spin", seconds=0.1)
    ran = workers.counts() != before
    report = holder.do("leave")
    if freezing_machine.freezer == "cgroup2":
        assert not ran
        assert report["verdict"] == "clean", report
    else:
        assert report["verdict"] == "contended", report
        assert any("workers" in it and "continued" in it for it in report["reasons"])
    wait_until(freezing_machine.nobody_is_frozen)
    workers.all_go_on()


def test_a_parent_sees_no_stop(freezing_machine: Machine) -> None:
    """Not in a cgroup; nor under SIGSTOP, where the parent is of the same tenant."""
    machine = freezing_machine
    code = """
import os, sys, time
child = os.fork()
if child == 0:
    while True:
        time.sleep(0.001)
print(child, flush=True)
for line in sys.stdin:
    pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
    print(pid, status, flush=True)
os.kill(child, 9)
"""
    process = machine.start(
        [KREX, "run", "--", sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    child = int(process.stdout.readline())
    machine.pids.add(child)
    holder = machine.actor()
    holder.do("hold")
    assert is_frozen(child)
    holder.do("leave")
    wait_until(machine.nobody_is_frozen)
    process.stdin.write(b"\n")
    process.stdin.flush()
    pid, status = map(int, process.stdout.readline().split())
    if machine.freezer == "cgroup2":
        assert (pid, status) == (0, 0)
    else:
        # That it was continued may show; that it was stopped, never.
        assert pid == 0 or os.WIFCONTINUED(status)
    process.communicate(b"")


def test_groups_that_a_command_made_below_its_own_are_frozen_too(tmp_path: Path) -> None:
    """And go when it goes."""
    with machine_with("cgroup2") as machine, Workers(machine, tmp_path) as workers:
        path = cgroup_of(workers.process.pid)
        assert path is not None
        group = cgroup_mount() / path.lstrip("/")
        below = group / "a" / "b"
        below.mkdir(parents=True)
        (below / "cgroup.procs").write_text(str(workers.pids[1]))
        holder = machine.actor()
        holder.do("hold")
        workers.none_goes_on(holder)
        report = holder.do("leave")
        assert report["verdict"] == "clean", report
        workers.all_go_on()
        workers.kill()
        wait_until(lambda: set(machine.tenants()) == {holder.pid})
        assert not group.exists()


def test_a_freeze_that_fails_halfway_is_undone(tmp_path: Path) -> None:
    """SIGSTOP is refused for one process of many, which has become another user's."""
    other, owner = 54321, 54322
    # May become another user and read everything, but not signal others' processes.
    capabilities = "-all,+setuid,+dac_override,+dac_read_search,+sys_ptrace"
    as_owner = ["setpriv", f"--reuid={owner}", f"--regid={owner}", "--clear-groups"]
    as_owner += [f"--inh-caps={capabilities}", f"--ambient-caps={capabilities}", "--"]
    body = f"def parent():\n    os.setresuid({other}, {other}, {other})"
    code = WORKERS.replace("def parent():", body)
    with machine_with("sigstop") as machine:
        os.chown(machine.runtime_dir, owner, owner)
        with Workers(machine, tmp_path, as_owner, code) as workers:
            command = [*as_owner, KREX, "run", "--", "env", sys.executable, ACTOR]
            holder = Actor(machine.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(2):
                holder.do("hold")
                workers.all_go_on()
                report = holder.do("leave_anyhow")
                assert report["verdict"] == "contended", report
                assert report["siblings"][0]["frozen"] == "no"
                assert any("workers" in it and "another user" in it for it in report["reasons"])
            holder.quit()
        done = machine.run([*as_owner, KREX, "recover", "--purge"])
        assert done.returncode == 0, done.stderr


def test_a_freeze_that_does_not_complete_is_undone(tmp_path: Path) -> None:
    """A task in state D never reports frozen; the freeze must not complete later, either."""
    top = Path("/sys/fs/cgroup/freezer")
    if not (top / "cgroup.procs").exists():
        pytest.skip("without the freezer of version 1 nothing keeps a task in state D at will")
    group = top / f"test-{os.getpid()}"
    group.mkdir()
    try:
        with machine_with("cgroup2") as machine, Workers(machine, tmp_path) as workers:
            (group / "cgroup.procs").write_text(str(workers.pids[1]))
            (group / "freezer.state").write_text("FROZEN")
            wait_until(lambda: (group / "freezer.state").read_text().strip() == "FROZEN")
            try:
                holder = machine.actor()
                holder.do("hold")
                report = holder.do("leave")
            finally:
                (group / "freezer.state").write_text("THAWED")
            assert report["verdict"] == "contended", report
            assert any("did not freeze in time" in it for it in report["reasons"])
            assert report["siblings"][0]["frozen"] == "no"
            workers.all_go_on()
            holder.do("hold")
            workers.none_goes_on(holder)
            assert holder.do("leave")["verdict"] == "clean"
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def test_the_choice_is_shown(freezing_machine: Machine) -> None:
    machine = freezing_machine
    actor = machine.actor()
    actor.do("hold")
    assert actor.do("leave")["freezer"] == machine.freezer
    assert machine.tenants()[actor.pid]["freezer"] == machine.freezer
    assert machine.freezer in machine.krex("status").stdout
    assert (len(machine.groups()) == 1) == (machine.freezer == "cgroup2")


def test_auto_prefers_cgroups(machine: Machine) -> None:
    actor = machine.actor()
    assert machine.tenants()[actor.pid]["freezer"] == "cgroup2"
    path = cgroup_of(actor.pid)
    own = cgroup_of(os.getpid())
    assert path is not None
    assert own is not None
    assert path.startswith(f"{own.rstrip('/')}/krex-"), "below the caller's own: its limits stay"
