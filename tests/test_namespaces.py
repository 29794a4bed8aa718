"""PID namespaces that share nothing but the runtime directory, as containers do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import ACTOR, KREX, LIMIT, Actor, Machine, is_frozen, wait_until

UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
# A shell that stays, so that the command is not PID 1; a little longer than the command, so that
# the namespace's supervisor can give its slot back before it ends with the namespace.
INIT = ["sh", "-c", '"$@"; status=$?; sleep 0.5; exit $status', "sh"]


class Inside(Actor):
    """An actor in a PID namespace of its own. Its process id means something only in there."""

    outside: int


def end_namespaces() -> None:
    """End what `actor_inside` started, in order: before the machine ends the rest by force."""
    while running:
        process = running.pop()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.wait(LIMIT)


@pytest.fixture
def machine(machine: Machine) -> Iterator[Machine]:
    yield machine
    end_namespaces()


@pytest.fixture
def freezing_machine(freezing_machine: Machine) -> Iterator[Machine]:
    yield freezing_machine
    end_namespaces()


running: list[subprocess.Popen[bytes]] = []


def actor_inside(
    machine: Machine,
    *options: str,
    launcher: Sequence[str] = (KREX, "run"),
    init: Sequence[str] = INIT,
    before: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> Inside:
    """Start one: BEFORE unshare … INIT krex run OPTIONS -- actor."""
    command = [*before, *UNSHARE, *init, *launcher]
    if launcher:
        command += [*options, "--"]
    process = machine.start(
        [*command, sys.executable, ACTOR], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    running.append(process)
    actor = Inside(process)
    actor.outside = called_out_here(process.pid, actor.pid)
    machine.pids.add(actor.outside)
    return actor


def children_of(pid: int) -> list[int]:
    try:
        return [int(it) for it in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def called_out_here(top: int, inside: int) -> int:
    """The process below `top` that is called `inside` in the innermost namespace it is in."""
    found = []
    below = [top]
    while below:
        pid = below.pop()
        below += children_of(pid)
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            names = next(it for it in status.splitlines() if it.startswith("NSpid:")).split()[1:]
            if len(names) > 1 and int(names[-1]) == inside:
                found.append(pid)
    (pid,) = found
    return pid


def test_regions_exclude_across_namespaces_both_ways(freezing_machine: Machine) -> None:
    machine = freezing_machine
    inside = actor_inside(machine, "--name", "inside")
    outside = machine.actor("--name", "outside")
    assert inside.pid != inside.outside
    for _ in range(2):
        for holder, sibling, name in (
            (outside, inside.outside, "inside"),
            (inside, outside.pid, "outside"),
        ):
            holder.do("hold")
            assert is_frozen(sibling)
            report = holder.do("leave")
            assert report["verdict"] == "clean", report
            (entry,) = report["siblings"]
            assert (entry["name"], entry["frozen"]) == (name, machine.freezer)
            wait_until(machine.nobody_is_frozen)
    pairs = [it for it in machine.status()["supervisors"] if it["alive"]]
    assert len(pairs) == 2, "one for each namespace"


def test_submissions_wait_across_namespaces(machine: Machine) -> None:
    inside, outside = actor_inside(machine), machine.actor()
    inside.do("submit")
    outside.do("hold")
    inside.send("submit")
    outside.do("spin", seconds=0.1)
    assert inside.poll_answer() is None
    report = outside.do("leave")
    assert report["verdict"] == "clean", report
    assert [it["submissions"] for it in report["siblings"]] == [0]
    inside.answer()


def test_two_namespaces_that_use_the_same_process_ids(freezing_machine: Machine) -> None:
    """Process ids of one namespace mean nothing in another."""
    machine = freezing_machine
    one = actor_inside(machine, "--name", "one")
    two = actor_inside(machine, "--name", "two")
    assert one.pid == two.pid
    third = machine.actor()
    for holder in (one, two, third):
        holder.do("hold")
        others = {one.outside, two.outside, third.pid} - {getattr(holder, "outside", holder.pid)}
        assert all(is_frozen(pid) for pid in others)
        report = holder.do("leave")
        assert report["verdict"] == "clean", report
        assert len(report["siblings"]) == 2
        wait_until(machine.nobody_is_frozen)


def test_pid_1_is_frozen_or_named(freezing_machine: Machine) -> None:
    """Init of a namespace cannot be stopped from inside; a cgroup freezes it all the same."""
    machine = freezing_machine
    init = actor_inside(machine, "--name", "init", init=())
    assert init.pid == 1
    holder = machine.actor()
    holder.do("hold")
    if machine.freezer == "cgroup2":
        assert is_frozen(init.outside)
        report = holder.do("leave")
        assert report["verdict"] == "clean", report
    else:
        assert init.do("ping") == 1
        report = holder.do("leave")
        assert report["verdict"] == "contended", report
        assert report["siblings"][0]["frozen"] == "no"
        assert any("init" in it and "PID 1" in it for it in report["reasons"])
    init.do("hold")
    assert is_frozen(holder.pid)
    assert init.do("leave")["verdict"] == "clean"


def test_a_namespace_without_its_own_proc_is_told(machine: Machine) -> None:
    """Process ids read in that /proc would mean other processes."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    done = machine.run([*unshare, KREX, "run", "--", "true"])
    assert done.returncode == 125
    for word in ("/proc", "another PID namespace", "--mount-proc"):
        assert word in done.stderr
    assert done.stderr.count("\n") == 1
    code = "import krex.region as region\nwith region.critical():\n    pass\n"
    done = machine.run([*unshare, sys.executable, "-c", code])
    assert done.returncode == 1
    assert "SegmentError" in done.stderr
    assert "--mount-proc" in done.stderr
    assert machine.tenants() == {}
    # Looking works without: it names nobody by a process id.
    assert machine.run([*unshare, KREX, "status"]).returncode == 0


@pytest.mark.parametrize("role", ["holder", "sibling", "waiter"])
def test_the_end_of_a_namespace_frees_everybody(machine: Machine, role: str) -> None:
    """Its supervisor dies with it. Somebody else has to notice."""
    inside = actor_inside(machine, "--name", "inside")
    outside, third = machine.actor("--name", "outside"), machine.actor("--name", "third")
    if role == "holder":
        inside.do("hold", max_hold=3600)
        assert is_frozen(outside.pid)
    else:
        outside.do("hold", max_hold=3600)
        assert is_frozen(inside.outside)
        if role == "waiter":
            inside.send("hold")
    # All of the namespace at once: the kernel kills it with its init.
    (init,) = children_of(inside.process.pid)
    os.kill(init, signal.SIGKILL)
    inside.process.wait(LIMIT)
    if role == "holder":
        assert outside.do("ping") == outside.pid
    else:
        outside.do("spin", seconds=0.2)
        outside.do("leave_anyhow")
    wait_until(lambda: {it["name"] for it in machine.status()["tenants"]} == {"outside", "third"})
    for actor in (outside, third):
        actor.do("hold", timeout=60)
        report = actor.do("leave")
        assert report["verdict"] == "clean", report
        wait_until(machine.nobody_is_frozen)


@pytest.mark.parametrize("launcher", ["krex run", "bare"])
def test_a_namespace_below_a_tenant(freezing_machine: Machine, launcher: str) -> None:
    """A holder in there: what runs it is its ancestor, and is not frozen."""
    machine = freezing_machine
    before = [KREX, "run", "--name", "runner", "--", "sh", "-c", '"$@"; exit $?', "sh"]
    words = (KREX, "run", "--name", "inside") if launcher == "krex run" else ()
    inside = actor_inside(machine, before=before, launcher=words)
    runner = inside.process.pid
    sibling = machine.actor()
    # Twice: at the first region a bare one becomes a tenant.
    for _ in range(2):
        inside.do("hold")
        assert is_frozen(sibling.pid)
        assert not is_frozen(inside.outside)
        assert not is_frozen(runner)
        inside.do("spin", seconds=0.1)
        report = inside.do("leave")
        assert report["verdict"] == "clean", report
    sibling.do("hold")
    assert is_frozen(inside.outside)
    assert is_frozen(runner)
    report = sibling.do("leave")
    assert report["verdict"] == "clean", report
    wait_until(machine.nobody_is_frozen)


def test_a_region_is_joined_from_a_namespace_below(freezing_machine: Machine) -> None:
    """A sandbox that the holder starts inside its region."""
    machine = freezing_machine
    holder, sibling = machine.actor(), machine.actor()
    holder.do("hold")
    code = """
import krex, krex.region as region
with krex.submission(timeout=20):
    pass
with region.critical(timeout=20) as timed:
    pass
print(timed.report.joined)
"""
    command: list[Any] = [*UNSHARE, *INIT, KREX, "run", "--", sys.executable, "-c", code]
    # Busily: it takes a while until a namespace has ended.
    run = f"""
import subprocess, tempfile
with tempfile.TemporaryFile() as file:
    process = subprocess.Popen({command!r}, stdout=file, stderr=file)
    while process.poll() is None:
        pass
    file.seek(0)
    value = file.read().decode()
"""
    assert holder.do("run", code=run) == "True\n"
    assert is_frozen(sibling.pid)
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
