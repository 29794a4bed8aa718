"""Hand-over: the next holder follows under the closed gate, and others are not starved by that."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from harness import LIMIT, Actor, ActorError, Machine, is_frozen, process_state, wait_until

# Nothing here is to be ended by the budget, unless a test says so.
LONG = {"KREX_MAX_CLOSED": "1000"}


@pytest.fixture
def handing_over_machine(freezing_machine: Machine) -> Machine:
    freezing_machine.environment.update(LONG)
    return freezing_machine


class Line:
    """A holder in its region, and others in the queue behind it, frozen."""

    def __init__(self, machine: Machine, holder: Actor, *waiters: tuple[Actor, dict[str, object]]):
        self.machine = machine
        line = [(holder, {}), *waiters]
        # A grant does not wait long: on a slow machine it takes a few attempts.
        assert any(self.form(line) for _ in range(10)), "the queue is filled in time"
        self.first_epoch: int = holder.answer()["epoch"]
        for waiter, _ in waiters:
            wait_until(lambda waiter=waiter: is_frozen(waiter.pid), "the waiter is frozen")

    def form(self, line: list[tuple[Actor, dict[str, object]]]) -> bool:
        """Have them queue in this order. If that takes too long, all leave again."""
        # Who comes once a region runs is frozen before it queues. So the first region is that of
        # somebody who is stopped with its grant: nobody is frozen for that.
        fault = self.machine.runtime_dir / "fault of the first"
        fault.write_text("granted=stop")
        first = self.machine.actor(env={"KREX_FAULT": f"@{fault}"})
        epoch = self.machine.device()["epoch"]
        first.send("whole")
        wait_until(lambda: process_state(first.pid) == "T", "the first is stopped")
        for number, (actor, options) in enumerate(line):
            actor.send("hold", **options)
            wait_until(lambda number=number: self.length(epoch) > number)
        in_time = self.machine.device()["epoch"] == epoch + 1
        first.kill()
        if not in_time:
            waiting = [actor for actor, _ in line]
            while waiting:
                for actor in list(waiting):
                    if actor.poll_answer(0.01) is not None:
                        waiting.remove(actor)
                        with contextlib.suppress(ActorError, IndexError):
                            actor.do("leave")
        return in_time

    def length(self, epoch: int) -> int:
        """Of the queue; any that is wished, if the first has lost its grant."""
        device = self.machine.device()
        return len(device["queue"]) if device["epoch"] <= epoch + 1 else 1000


def actors(machine: Machine, count: int) -> list[Actor]:
    """Actors that the supervisor knows, so that they come into the queue quickly."""
    found = [machine.actor() for _ in range(count)]
    for actor in found:
        actor.do("submit")
    return found


def test_the_next_holder_follows_under_the_closed_gate(handing_over_machine: Machine) -> None:
    """No submission of anybody else comes between three regions, and nobody is thawed."""
    machine = handing_over_machine
    holder, second, third, bystander = actors(machine, 4)
    bystander.do("begin_submission")
    bystander.do("end_submission")
    line = Line(machine, holder, (second, {}), (third, {}))
    since = time.monotonic()
    bystander.send("submit")  # It reads this once it is thawed.
    for number, (leaver, entering) in enumerate([(holder, second), (second, third)]):
        leaver.do("spin", seconds=0.02)
        leaver.send("leave")  # Whether it comes to answering before it is frozen is anybody's.
        assert entering.answer()["epoch"] == line.first_epoch + number + 1
        elapsed = time.monotonic() - since
        assert machine.tenants()[bystander.pid]["frozen_s"] > elapsed, "it was thawed meanwhile"
    third.do("spin", seconds=0.02)
    left_at = time.monotonic()
    report = third.do("leave")
    assert report["verdict"] == "clean", report
    frozen = {it["name"]: it["frozen"] for it in report["siblings"]}
    assert set(frozen.values()) == {machine.freezer}, report
    assert bystander.answer() > left_at
    for leaver in (holder, second):
        assert leaver.answer()["verdict"] == "clean"
    wait_until(machine.nobody_is_frozen)


def test_the_last_holder_is_a_sibling_of_the_next(handing_over_machine: Machine) -> None:
    machine = handing_over_machine
    holder, second = actors(machine, 2)
    Line(machine, holder, (second, {}))
    holder.do("spin", seconds=0.02)
    holder.send("leave")
    second.answer()
    wait_until(lambda: is_frozen(holder.pid), "the last holder is frozen")
    assert second.do("leave")["verdict"] == "clean"
    assert holder.answer()["verdict"] == "clean"


def test_the_next_holders_ancestors_run_with_it(
    handing_over_machine: Machine, tmp_path: Path
) -> None:
    machine = handing_over_machine
    holder, parent, bystander = actors(machine, 3)
    with forked(machine, parent, tmp_path) as child:
        child.do("submit")
        Line(machine, holder, (child, {}))
        assert is_frozen(parent.pid)
        holder.do("spin", seconds=0.02)
        holder.send("leave")
        child.answer()
        assert parent.do("ping") == parent.pid
        assert is_frozen(bystander.pid)
        child.do("spin", seconds=0.02)
        assert child.do("leave")["verdict"] == "clean"
        wait_until(machine.nobody_is_frozen)


@contextlib.contextmanager
def forked(machine: Machine, parent: Actor, directory: Path) -> Iterator[Actor]:
    """A child of an actor, as an actor."""
    path = str(directory / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        parent.do("fork", path=path)
        connection, _ = listener.accept()
    with connection, connection.makefile("rwb", buffering=0) as stream:
        child = Actor(Connected(stream))  # type: ignore[arg-type]
        machine.pids.add(child.pid)
        yield child


class Connected:
    """What an `Actor` needs of its process, for one that is connected by a socket."""

    args = "a child"

    def __init__(self, stream: BinaryIO) -> None:
        self.stdin = self.stdout = stream


# --- waiting ---


def test_a_waiter_that_was_frozen_past_its_timeout_gets_it_at_its_thaw(
    handing_over_machine: Machine,
) -> None:
    """It is passed over: its turn would come too late for it."""
    machine = handing_over_machine
    holder, late, second = actors(machine, 3)
    line = Line(machine, holder, (late, {"timeout": 1.0}), (second, {}))
    holder.do("spin", seconds=1.1)
    holder.send("leave")
    assert second.answer()["epoch"] == line.first_epoch + 1
    assert is_frozen(late.pid)
    second.do("spin", seconds=0.02)
    second.do("leave")
    with pytest.raises(ActorError, match="no region on cpu") as caught:
        late.answer()
    assert caught.value.kind == "RegionTimeout"
    assert machine.device()["queue"] == []
    wait_until(machine.nobody_is_frozen)


def test_who_stops_with_its_grant_claims_again(handing_over_machine: Machine) -> None:
    machine = handing_over_machine
    fault = machine.runtime_dir / "fault of the waiter"
    holder = machine.actor()
    waiter = machine.actor(env={"KREX_FAULT": f"@{fault}"})
    for actor in (holder, waiter):
        actor.do("submit")
    line = Line(machine, holder, (waiter, {"timeout": 2.0}))
    fault.write_text("granted=stop")
    holder.do("spin", seconds=0.02)
    holder.do("leave")
    wait_until(lambda: process_state(waiter.pid) == "T", "it is stopped with its grant")
    wait_until(lambda: machine.device()["phase"] == "open", "its grant is taken from it")
    waiter.signal(18)
    assert waiter.answer()["epoch"] > line.first_epoch
    waiter.do("leave")


def test_who_does_not_take_its_grant_is_passed_over(handing_over_machine: Machine) -> None:
    machine = handing_over_machine
    holder, stopped, waiter = actors(machine, 3)
    line = Line(machine, holder, (stopped, {}), (waiter, {}))
    stopped.signal(19)
    try:
        holder.do("spin", seconds=0.02)
        holder.send("leave")
        if machine.freezer == "sigstop":
            # What the supervisor continues was stopped by it, as far as can be told.
            stopped.answer()
            stopped.send("leave")
        assert waiter.answer()["epoch"] == line.first_epoch + 2
        waiter.do("spin", seconds=0.02)
        waiter.do("leave")
    finally:
        stopped.signal(18)
    if machine.freezer != "sigstop":
        stopped.answer()
        stopped.do("leave")
    wait_until(machine.nobody_is_frozen)


@pytest.mark.parametrize("victim", ["leaver", "next"])
def test_one_dies_at_the_hand_over(handing_over_machine: Machine, victim: str) -> None:
    """The leaver between its swap and its ring; or who was granted the turn, with its grant."""
    machine = handing_over_machine
    machine.environment.pop("KREX_FAULT", None)
    fault = machine.runtime_dir / "fault of one"
    armed = machine.actor(env={"KREX_FAULT": f"@{fault}"})
    armed.do("submit")
    other, waiter = actors(machine, 2)
    holder, second = (armed, other) if victim == "leaver" else (other, armed)
    line = Line(machine, holder, (second, {}), (waiter, {}))
    fault.write_text("handed_over=kill" if victim == "leaver" else "granted=kill")
    holder.do("spin", seconds=0.02)
    holder.send("leave")
    assert armed.process.wait(LIMIT) != 0
    if victim == "leaver":
        assert second.answer()["epoch"] == line.first_epoch + 1
        second.do("spin", seconds=0.02)
        second.send("leave")
    assert waiter.answer()["epoch"] == line.first_epoch + 2
    waiter.do("spin", seconds=0.02)
    waiter.do("leave")
    wait_until(machine.nobody_is_frozen)


def test_a_turn_is_not_handed_to_one_whom_another_region_keeps_frozen(
    handing_over_machine: Machine,
) -> None:
    """The first in the queue shares another device, on which a region runs: the second is next."""
    machine = handing_over_machine
    holder, waiter = actors(machine, 2)
    both = machine.actor("--device", "cpu", "--device", "cpu:b")
    elsewhere = machine.actor("--device", "cpu:b")
    both.do("submit")
    elsewhere.do("submit")
    line = Line(machine, holder, (both, {}), (waiter, {}))
    elsewhere.do("hold")
    assert machine.device("cpu:b")["phase"] == "held"
    holder.do("spin", seconds=0.02)
    holder.send("leave")
    assert waiter.answer()["epoch"] == line.first_epoch + 1
    waiter.do("spin", seconds=0.02)
    waiter.do("leave")
    assert is_frozen(both.pid)
    assert elsewhere.do("leave")["verdict"] == "clean"
    both.answer()
    both.do("leave")


def test_a_granted_turn_keeps_nobody_frozen_whom_another_device_froze(
    handing_over_machine: Machine,
) -> None:
    """A turn that was taken at an open gate, by one that stops with it, and a gate that opens."""
    machine = handing_over_machine
    both = machine.actor("--device", "cpu", "--device", "cpu:b")
    elsewhere = machine.actor("--device", "cpu:b")
    for actor in (both, elsewhere):
        actor.do("submit")
    elsewhere.do("hold")
    assert is_frozen(both.pid)
    fault = machine.runtime_dir / "fault of the stopped"
    fault.write_text("granted=stop")
    stopped = machine.actor(env={"KREX_FAULT": f"@{fault}"})
    stopped.send("whole")
    wait_until(lambda: process_state(stopped.pid) == "T", "it is stopped with its turn")
    elsewhere.do("leave")
    wait_until(lambda: not is_frozen(both.pid) or machine.device()["phase"] == "open")
    stopped.signal(18)
    stopped.answer()
    wait_until(machine.nobody_is_frozen)


def test_a_handed_over_turn_and_a_claim_on_another_device(
    handing_over_machine: Machine,
) -> None:
    """The next holder shares a device that somebody takes just then: neither loses its turn."""
    machine = handing_over_machine
    fault = machine.runtime_dir / "fault of the leaver"
    holder = machine.actor(env={"KREX_FAULT": f"@{fault}"})
    both = machine.actor("--device", "cpu", "--device", "cpu:b")
    other = machine.actor("--device", "cpu:b")
    for actor in (holder, both, other):
        actor.do("submit")
    line = Line(machine, holder, (both, {}))
    fault.write_text("handed_over=stop")
    holder.do("spin", seconds=0.02)
    holder.send("leave")
    wait_until(lambda: process_state(holder.pid) == "T", "it is stopped before it rings")
    other.send("whole", timeout=LIMIT)
    assert both.answer()["epoch"] >= line.first_epoch + 1
    both.do("leave")
    assert other.answer()["verdict"] in ("clean", "contended")
    holder.signal(18)
    holder.answer()
    wait_until(machine.nobody_is_frozen)


# --- the budget ---


def test_a_spent_budget_opens_the_gate_for_a_quarter_of_the_run(freezing_machine: Machine) -> None:
    machine = freezing_machine
    machine.environment["KREX_MAX_CLOSED"] = "0.3"
    holder, waiter, bystander = actors(machine, 3)
    Line(machine, holder, (waiter, {}))
    bystander.send("submit")
    holder.do("spin", seconds=0.5)
    left_at = time.monotonic()
    holder.send("leave")
    submitted_at = bystander.answer()
    assert submitted_at > left_at
    outcome = waiter.poll_answer(LIMIT)
    assert outcome is not None
    assert outcome["at"][1] > submitted_at
    assert outcome["at"][1] - left_at >= 0.5 / 4
    waiter.do("leave")


def test_regions_in_turns_do_not_starve_others(freezing_machine: Machine) -> None:
    machine = freezing_machine
    machine.environment["KREX_MAX_CLOSED"] = "0.1"
    first, second, bystander = actors(machine, 3)
    code = """
import time
end = time.monotonic() + 2.5
while time.monotonic() < end:
    with region.critical():
        stop = time.monotonic() + 0.02
        while time.monotonic() < stop: pass
"""
    for actor in (first, second):
        actor.send("run", code=code)
    wait_until(lambda: machine.device()["epoch"] > 3, "they take turns")
    # Each of these may have to wait for a whole run, but none for more.
    times = [bystander.do("submit") for _ in range(5)]
    assert times == sorted(times)
    for actor in (first, second):
        assert actor.poll_answer() is None, "they are still at it"
    for actor in (first, second):
        actor.answer()


def test_a_late_leaver_owes_nothing(freezing_machine: Machine) -> None:
    """One whose region was revoked long ago: the time since then was not closed."""
    machine = freezing_machine
    machine.environment["KREX_MAX_CLOSED"] = "0.1"
    late, other = actors(machine, 2)
    late.do("hold", max_hold=0.2)
    late.do("spin", seconds=4.0)
    late.do("leave_anyhow")
    other.do("hold", timeout=0.5)
    other.do("leave")


def test_open_time_that_is_owed_counts_against_a_timeout(freezing_machine: Machine) -> None:
    machine = freezing_machine
    machine.environment["KREX_MAX_CLOSED"] = "0.1"
    holder, first, second = actors(machine, 3)
    holder.do("hold")
    holder.do("spin", seconds=4.0)
    holder.do("leave")
    first.send("hold")
    wait_until(lambda: machine.device()["queue"], "it queues, though the gate is open")
    with pytest.raises(ActorError, match="KREX_MAX_CLOSED"):
        second.do("hold", timeout=0.05)
    first.answer()
    first.do("leave")


def test_a_waiting_shell_is_owed_nothing(machine: Machine) -> None:
    """The ancestors of the holder run anyway."""
    code = (
        "import time, krex.region as region\n"
        "for _ in range(3):\n"
        "    with region.critical(timeout=0.05):\n"
        "        end = time.monotonic() + 0.4\n"
        "        while time.monotonic() < end: pass\n"
    )
    script = machine.runtime_dir / "script.py"
    script.write_text(code)
    command = f"{sys.executable} {script}; exit $?"
    result = machine.krex("run", "sh", "-c", command, env={"KREX_MAX_CLOSED": "0.1"})
    assert (result.returncode, result.stderr) == (0, "")


def test_who_is_alone_is_not_kept_waiting(machine: Machine) -> None:
    """However much closed time a device had: without siblings there is nobody to starve."""
    machine.environment["KREX_MAX_CLOSED"] = "0.05"
    actor = machine.actor()
    for _ in range(3):
        actor.do("hold", timeout=0.02)
        actor.do("spin", seconds=0.1)
        actor.do("leave")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "1e300"])
def test_a_bad_budget_is_an_error(machine: Machine, value: str) -> None:
    # Bare: `krex run` refuses it before anything runs.
    actor = machine.actor(bare=True, env={"KREX_MAX_CLOSED": value})
    with pytest.raises(ActorError, match="KREX_MAX_CLOSED") as caught:
        actor.do("hold")
    assert caught.value.kind == "ValueError"
    assert machine.device()["phase"] == "open"
