"""Many tenants, hostile ones, several devices, locks held by the frozen."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import KREX, LIMIT, ActorError, Machine, is_frozen, is_running, wait_until

RUN = [KREX, "run", "--"]
PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def test_two_hundred_tenants_at_once(freezing_machine: Machine) -> None:
    """All frozen in one region, all thawed after it, all slots given back in the end."""
    machine = freezing_machine
    reader, writer = os.pipe()
    commands = [
        machine.start(
            [KREX, "run", "--name", f"tenant {number}", "--", "cat"],
            stdin=reader,
            stdout=subprocess.DEVNULL,
        )
        for number in range(200)
    ]
    os.close(reader)
    pids = {command.pid for command in commands}
    wait_until(lambda: pids <= {pid for pid in machine.tenants() if name_of(pid) == "cat"})
    holder = machine.actor()
    holder.do("hold")
    holder.send("spin", seconds=2.0)
    frozen = {pid for pid, it in machine.tenants().items() if it["frozen"]}
    assert frozen == pids
    assert all(is_frozen(pid) for pid in pids)
    holder.answer()
    report = holder.do("leave")
    assert report["verdict"] == "clean", report["reasons"][:3]
    assert len(report["siblings"]) == 200
    assert {it["name"] for it in report["siblings"]} == {f"tenant {it}" for it in range(200)}
    assert {it["frozen"] for it in report["siblings"]} == {machine.freezer}
    machine.pids |= pids
    wait_until(machine.nobody_is_frozen)
    os.close(writer)
    for command in commands:
        assert command.wait(LIMIT) == 0
    wait_until(lambda: set(machine.tenants()) == {holder.pid})


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


# A bomb that can't get out of hand: each process needs one of a fixed number of tokens, which
# are bytes in a pipe, and everything dies at a fixed time, by an alarm of its own.
BOMB = """
import os, signal, sys, time
TOKENS, LIFE = 60, 6.0
deadline = time.monotonic() + LIFE
reader, writer = os.pipe()
os.set_blocking(reader, False)
os.write(writer, b"t" * TOKENS)
def arm():
    signal.setitimer(signal.ITIMER_REAL, max(0.001, deadline - time.monotonic()))
arm()
print("burning", flush=True)
while time.monotonic() < deadline:
    try:
        os.read(reader, 1)
    except BlockingIOError:
        if os.getpid() != os.getpgrp():
            os.write(writer, b"t")
            os._exit(0)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.001)
        continue
    if os.fork() == 0:
        arm()
"""


def test_a_fork_bomb_is_frozen_or_named(freezing_machine: Machine) -> None:
    """A group freezes whole whatever is born in it; SIGSTOP may be outrun, and then says so."""
    machine = freezing_machine
    bomb = machine.start(
        [KREX, "run", "--name", "bomb", "--", sys.executable, "-S", "-c", BOMB],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert bomb.stdout is not None
        assert bomb.stdout.readline() == b"burning\n"
        holder = machine.actor()
        for _ in range(3):
            holder.do("hold")
            holder.do("spin", seconds=0.05)
            report = holder.do("leave")
            (entry,) = report["siblings"]
            if machine.freezer == "cgroup2":
                assert (report["verdict"], entry["frozen"]) == ("clean", "cgroup2"), report
            else:
                assert report["verdict"] in ("clean", "contended"), report
                assert (report["verdict"] == "clean") == (entry["frozen"] == "sigstop")
                assert all("bomb" in reason for reason in report["reasons"])
        assert is_running(bomb.pid)
    finally:
        # Its session is its own: nobody else is in that group.
        os.killpg(bomb.pid, signal.SIGKILL)
        bomb.wait(LIMIT)
    wait_until(lambda: not stopped_in_session(bomb.pid))
    wait_until(lambda: set(machine.tenants()) == {holder.pid})


def stopped_in_session(session: int) -> list[int]:
    """Processes of that session that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


# Several devices


def test_a_holder_is_not_frozen_by_a_claim_on_another_device(freezing_machine: Machine) -> None:
    machine = freezing_machine
    one, two = machine.actor("--device", "cpu"), machine.actor("--device", "cpu:b")
    sibling_of_one = machine.actor("--device", "cpu")
    sibling_of_two = machine.actor("--device", "cpu:b")
    one.do("hold")
    two.do("hold")
    assert [is_frozen(it.pid) for it in (one, two)] == [False, False]
    assert [is_frozen(it.pid) for it in (sibling_of_one, sibling_of_two)] == [True, True]
    for holder, name in ((one, "cpu"), (two, "cpu:b")):
        report = holder.do("leave")
        assert (report["device"], report["verdict"]) == (name, "clean"), report
        assert len(report["siblings"]) == 1
    wait_until(machine.nobody_is_frozen)


def test_a_claim_that_would_freeze_a_holder_waits(machine: Machine) -> None:
    """The holder on one device shares the other as well."""
    both = machine.actor("--device", "cpu", "--device", "cpu:b", "--name", "both")
    other = machine.actor("--device", "cpu:b")
    both.do("hold", device="cpu")
    other.send("hold")
    both.do("spin", seconds=0.3)
    assert other.poll_answer() is None
    assert not is_frozen(both.pid)
    both.send("leave")  # it may be frozen before it has answered
    other.answer()
    assert is_frozen(both.pid)
    assert other.do("leave")["verdict"] == "clean"
    assert both.answer()["verdict"] == "clean"


def test_a_wait_for_another_device_ends_at_its_timeout(machine: Machine) -> None:
    machine.environment["KREX_SABOTAGE"] = "freeze"  # so that the waiter runs
    both = machine.actor("--device", "cpu", "--device", "cpu:b", "--name", "both")
    other = machine.actor("--device", "cpu:b")
    both.do("hold", device="cpu")
    both.send("spin", seconds=1.0)
    with pytest.raises(ActorError, match="both") as caught:
        other.do("hold", timeout=0.2)
    assert caught.value.kind == "RegionTimeout"
    assert machine.device("cpu:b")["phase"] == "open"
    both.answer()
    both.do("leave_anyhow")


def test_two_devices_shared_by_all_is_no_deadlock(freezing_machine: Machine) -> None:
    """Claims on both at the same moment, again and again: each gets its turn."""
    machine = freezing_machine
    devices = ["--device", "cpu", "--device", "cpu:b"]
    actors = [machine.actor(*devices) for _ in range(4)]
    for number, actor in enumerate(actors):
        device = ["cpu", "cpu:b"][number % 2]
        actor.send("call", function="many_regions", arguments={"device": device, "count": 15})
    outcomes = [actor.answer() for actor in actors]
    spans = sorted(tuple(span) for outcome in outcomes for span in outcome["spans"])
    assert len(spans) == 60
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert {verdict for outcome in outcomes for verdict in outcome["verdicts"]} == {"clean"}


# Locks and pipes that the frozen hold


LOCKING = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
file.close()
"""


def test_a_lock_held_by_a_frozen_sibling_is_waited_for(
    freezing_machine: Machine, tmp_path: Path
) -> None:
    """The stall breaker: the sibling goes on, the holder gets the lock, the verdict says so."""
    machine = freezing_machine
    code = LOCKING.replace("sys.stdin.readline()", "sys.stdin.readline(); print('on', flush=True)")
    command = [KREX, "run", "--name", "lock owner", "--", sys.executable, "-c", code]
    owner = machine.start([*command, tmp_path / "lock"], **PIPES)
    assert owner.stdin is not None
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"locked\n"
    holder = machine.actor()
    holder.do("hold")
    assert is_frozen(owner.pid)
    owner.stdin.write(b"\n")
    owner.stdin.flush()
    take = f"import fcntl\nfcntl.flock(open({str(tmp_path / 'lock')!r}, 'w'), fcntl.LOCK_EX)"
    holder.do("run", code=take)
    report = holder.do("leave")
    assert report["verdict"] == "contended", report
    assert "holder waited for lock owner" in report["reasons"][0]
    assert owner.wait(LIMIT) == 0
    holder.do("hold")
    assert holder.do("leave")["verdict"] == "clean"


def test_a_holder_that_waits_for_one_at_the_gate_gives_way(
    machine: Machine, tmp_path: Path
) -> None:
    """Thawing does not help if the sibling with the lock waits at the closed gate: revoked."""
    holder = machine.actor()
    owner = machine.actor("--name", "lock owner")
    lock = str(tmp_path / "lock")
    take = f"import fcntl\nregion.f = open({lock!r}, 'w')\nfcntl.flock(region.f, fcntl.LOCK_EX)"
    owner.do("run", code=take)
    holder.do("hold")
    owner.send("run", code="with krex.submission():\n    pass\nregion.f.close()")
    holder.do("run", code=take)
    owner.answer()
    report = holder.do("leave_anyhow")
    assert report["verdict"] == "revoked", report
    assert "ran on no CPU" in report["reasons"][0]


# Who is who


def test_a_bare_process_is_a_tenant_from_its_first_region(freezing_machine: Machine) -> None:
    machine = freezing_machine
    bare = machine.actor(bare=True)
    holder = machine.actor()
    assert set(machine.tenants()) == {holder.pid}
    bare.do("hold")
    assert is_frozen(holder.pid)
    assert bare.do("leave")["verdict"] == "clean"
    assert set(machine.tenants()) == {holder.pid, bare.pid}
    holder.do("hold")
    assert is_frozen(bare.pid)
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    assert [str(bare.pid) in it["name"] for it in report["siblings"]] == [True]


def test_one_that_attaches_during_a_region_ran_beside_it(machine: Machine) -> None:
    """Nobody knew of it: the verdict can't be clean."""
    holder, bare = machine.actor(), machine.actor(bare=True)
    machine.actor()  # a sibling, so that the supervisor has something to do
    holder.do("hold")
    bare.send("hold")
    wait_until(lambda: bare.pid in machine.tenants())
    holder.do("spin", seconds=0.05)
    holder.send("leave")  # it may be frozen before it has answered
    bare.answer()
    bare.do("leave_anyhow")
    report = holder.answer()
    assert report["verdict"] == "contended", report
    assert any(f"({bare.pid})" in reason for reason in report["reasons"])


def test_a_tenant_that_ends_in_a_region_is_no_disturbance(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling = machine.actor(), machine.actor()
    holder.do("hold")
    sibling.kill()
    holder.do("spin", seconds=0.1)
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    wait_until(lambda: set(machine.tenants()) == {holder.pid})


@pytest.mark.parametrize("by", ["kill", "exit", "exec", "exception"])
def test_a_holder_that_ends_frees_everybody(freezing_machine: Machine, by: str) -> None:
    machine = freezing_machine
    holder, sibling, waiter = machine.actor(), machine.actor(), machine.actor()
    holder.do("hold", max_hold=600)
    waiter.send("hold")
    assert is_frozen(sibling.pid)
    if by == "kill":
        holder.kill()
        status = -signal.SIGKILL
    else:
        # With exec the region ends with the new program, which knows nothing of it.
        code, status = {
            "exit": ("import os; os._exit(3)", 3),
            "exec": ("import os; os.execv('/bin/true', ['true'])", 0),
            "exception": ("raise SystemExit(4)", 4),
        }[by]
        holder.send("run", code=code)
    waiter.answer()
    report = waiter.do("leave")
    assert report["verdict"] == "clean", report
    # Not before: an interpreter leaves its region while it ends, and is a sibling from then on.
    assert holder.process.wait(LIMIT) == status
    wait_until(machine.nobody_is_frozen)
    assert sibling.do("ping") == sibling.pid
    wait_until(lambda: holder.pid not in machine.tenants())


def test_a_holders_main_thread_may_end(machine: Machine) -> None:
    """The process goes on in another thread: a zombie in /proc, but not dead."""
    code = """
import ctypes, os, threading, time
import krex.region as region
def hold():
    with region.critical() as timed:
        print("held", flush=True)
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            pass
    os.write(1, timed.report.verdict.encode() + b"\\n")
    os._exit(0)
threading.Thread(target=hold).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    sibling = machine.actor()
    process = machine.start([*RUN, sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert is_frozen(sibling.pid)
    assert process.stdout.readline() == b"clean\n"
    assert process.wait(LIMIT) == 0


def test_a_tenants_slot_lives_as_long_as_any_process_of_it(freezing_machine: Machine) -> None:
    """Background processes of a shell that has ended."""
    machine = freezing_machine
    script = "cat <&3 & echo $!; sleep 1.5"
    reader, writer = os.pipe()
    process = machine.start(
        [*RUN, "sh", "-c", f"exec 3<&0; {script}"],
        stdin=reader,
        stdout=subprocess.PIPE,
    )
    os.close(reader)
    assert process.stdout is not None
    background = int(process.stdout.readline())
    machine.pids.add(background)
    assert process.wait(LIMIT) == 0
    holder = machine.actor()
    holder.do("hold")
    assert is_frozen(background)
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    os.close(writer)
    wait_until(lambda: set(machine.tenants()) == {holder.pid})


def test_commands_that_start_and_end_all_the_time(freezing_machine: Machine) -> None:
    """Registrations, exits and regions at the same time; nothing leaks, nobody hangs."""
    machine = freezing_machine
    code = """
import json, os
import krex.region as region
verdicts = []
for _ in range(3):
    with region.critical() as timed:
        pass
    verdicts.append(timed.report.verdict)
os.write(1, json.dumps(verdicts).encode() + b"\\n")
"""
    script = f"""
for i in 1 2 3 4 5 6; do
  '{KREX}' run -- "$0" -c "$1" & '{KREX}' run -- true & '{KREX}' run -- "$0" -c "$1"
done
wait
"""
    done = machine.run(["sh", "-c", script, sys.executable, code])
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 12
    assert {verdict for line in lines for verdict in line} <= {"clean", "unknown"}
    wait_until(lambda: not machine.tenants())


def test_a_subreaper_does_not_freeze_its_own_supervisor(freezing_machine: Machine) -> None:
    """The pair becomes its child, as below PID 1 of a container, but not part of its tenant."""
    machine = freezing_machine
    reaper = machine.actor(bare=True)
    reaper.do("run", code="import ctypes\nassert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0")
    reaper.do("hold")
    assert reaper.do("leave")["verdict"] == "clean"
    pair = machine.supervisor()
    holder = machine.actor()
    for _ in range(2):
        holder.do("hold")
        assert is_frozen(reaper.pid)
        assert not any(is_frozen(pair[half]) for half in ("pid", "worker_pid"))
        report = holder.do("leave")
        assert report["verdict"] == "clean", report
        wait_until(machine.nobody_is_frozen)
    assert machine.supervisor() == pair | {"tenants": 2}


def test_a_supervisor_starts_unnoticed(machine: Machine) -> None:
    """No SIGCHLD, and no child that a caller's own `wait` would find."""
    code = """
import os, signal
calls = []
signal.signal(signal.SIGCHLD, lambda *_: calls.append(1))
with region.critical():
    pass
try:
    value = [calls, os.waitpid(-1, os.WNOHANG)]
except ChildProcessError:
    value = [calls, None]
"""
    assert machine.actor(bare=True).do("run", code=code) == [[], None]
