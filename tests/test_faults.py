"""SIGKILL and SIGSTOP of everybody, at every step: afterwards nobody is frozen, and it goes on.

Exact places are reached through fault points (rust/krex-core/src/hooks.rs): a process of krex
that passes an armed point kills or stops itself there, once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import KREX, LIMIT, Actor, Machine, is_running, process_state, wait_until

KILL, STOP, CONTINUE = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
SIGNALS = {"kill": KILL, "stop": STOP}

# Where a holder stands, and which of the eight steps that is. Drains and freezes are the
# supervisor's: see WORK. Isolation (step 6) is in test_isolation.py.
ENTERING = {
    "granted": "1 claimed",
    "closing": "2 closed the gate",
    "frozen": "3 to 5 turned back, drained, froze",
    "held": "7 runs the region",
}
LEAVING = {
    "leaving": "7 at its end",
    "reported": "8 has verified and reported",
    "handed_over": "8 has handed over, and told nobody",
    "opened": "8 has opened the gate, its budget being spent, and told nobody",
}


class Scene:
    """Actors with a fault point each, and what must be true in the end."""

    def __init__(self, machine: Machine, directory: Path, record: Callable[[str, object], None]):
        self.machine = machine
        self.directory = directory
        self.record = record
        self.stopped: set[int] = set()
        # The supervisor keeps the environment of whoever starts it.
        machine.environment["KREX_FAULT"] = f"@{directory / 'supervisor'}"
        assert machine.krex("run", "--", "true").returncode == 0

    def actor(self, name: str, **options: Any) -> Actor:
        environment = {"KREX_FAULT": f"@{self.directory / name}"}
        words = [] if options.get("bare") else ["--name", name]
        return self.machine.actor(*words, env=environment, **options)

    def arm(self, name: str, point: str, fault: str) -> None:
        """From now on `name` (of an actor, or "supervisor") falls at `point`, once."""
        path = self.directory / f"{name}.new"
        path.write_text(f"{point}={fault}")
        path.rename(self.directory / name)

    def has_fallen(self, name: str) -> bool:
        return not (self.directory / name).exists()

    def wait_for_stop(self, actor: Actor, name: str) -> None:
        """Wait until it stopped itself at its fault point."""
        wait_until(lambda: self.has_fallen(name), f"{name} comes to its fault point")
        wait_until(lambda: process_state(actor.pid) == "T", f"{name} stops")

    def signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if number == STOP:
            self.stopped.add(pid)
        else:
            self.stopped.discard(pid)

    def someone_is_frozen(self) -> bool:
        """Besides those that the test itself stopped."""
        for pid, tenant in self.machine.tenants().items():
            if pid not in self.stopped and (tenant["frozen"] or process_state(pid) == "T"):
                return True
        return False

    def is_released(self) -> None:
        """Wait until nobody is frozen, and note how long that took."""
        started = time.monotonic()
        wait_until(lambda: not self.someone_is_frozen(), "nobody is frozen any more")
        self.record("released_s", round(time.monotonic() - started, 4))

    def works(self, *survivors: Actor) -> None:
        """Nobody is frozen, survivors go on, and the next region excludes them all."""
        self.is_released()
        wait_until(lambda: self.machine.device()["phase"] == "open", "the gate is open")
        assert self.machine.device()["queue"] == []
        last = self.actor("last")
        for actor in survivors:
            actor.do("submit", timeout=LIMIT)
        wait_until(lambda: set(self.machine.tenants()) == {it.pid for it in (*survivors, last)})
        last.do("hold", timeout=LIMIT)
        last.do("spin", seconds=0.02)
        report = last.do("leave")
        assert report["verdict"] == "clean", report
        assert {it["frozen"] for it in report["siblings"]} <= {self.machine.freezer}, report
        assert len(report["siblings"]) == len(survivors)
        self.is_released()


@pytest.fixture
def scene(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> Iterator[Scene]:
    machine = Machine(freezer=getattr(request, "param", "cgroup2"))
    try:
        yield Scene(machine, tmp_path, record_property)
    finally:
        machine.close()


def leave(actor: Actor) -> str:
    """Leave the region; returns the verdict."""
    return str(actor.do("leave_anyhow")["verdict"])


def outcome(actor: Actor) -> str:
    """Wait for a whole region; returns its verdict."""
    answer = actor.poll_answer(LIMIT)
    assert answer is not None, f"no answer within {LIMIT} s"
    if "error" in answer:
        assert answer["error"] == "RegionRevoked", answer
        return "revoked"
    return str(answer["value"]["verdict"])


class Queue:
    """A holder that stopped itself at a point, one that queues behind it, and a bystander."""

    def __init__(self, scene: Scene, point: str, **options: Any) -> None:
        self.scene = scene
        self.sibling = scene.actor("sibling")
        self.holder = scene.actor("holder")
        self.waiter = scene.actor("waiter")
        for actor in (self.holder, self.waiter):
            actor.do("submit")
        # Who comes to a region that runs already is frozen before it queues. So both come while
        # the gate is closed and the region does not run yet.
        scene.arm("sibling", "granted", "stop")
        self.sibling.send("whole")
        scene.wait_for_stop(self.sibling, "sibling")
        scene.arm("holder", point, "stop")
        self.holder.send("whole", timeout=LIMIT, **options)
        self.wait_for_queue(["holder"])
        self.waiter.send("whole", timeout=LIMIT)
        self.wait_for_queue(["holder", "waiter"])
        self.sibling.signal(CONTINUE)
        scene.wait_for_stop(self.holder, "holder")

    def wait_for_queue(self, names: list[str]) -> None:
        """Wait until they queue; or, on a slow machine, have the turn already."""
        device = self.scene.machine.device
        wait_until(lambda: device()["queue"] == names or device()["holder"] != "sibling")


def matrix() -> Iterator[Any]:
    """Per case: freezer, where the holder stands, who falls, how."""
    for freezer in ("cgroup2", "sigstop"):
        for point in (*ENTERING, *LEAVING):
            for victim in ("holder", "sibling", "waiter", "keeper", "worker", "pair"):
                for fault in SIGNALS:
                    # A pair that is stopped as a whole is like a container that is stopped.
                    if victim == "pair" and fault == "stop":
                        continue
                    # Who freezes matters only where somebody is frozen, and for who thaws.
                    if freezer == "sigstop" and (
                        victim in ("sibling", "waiter")
                        or point not in ("frozen", "held", "leaving", "handed_over", "opened")
                        or (victim in ("keeper", "pair") and point != "held")
                    ):
                        continue
                    yield pytest.param(
                        freezer, point, victim, fault, id=f"{freezer}-{point}-{victim}-{fault}"
                    )


@pytest.mark.parametrize(("scene", "point", "victim", "fault"), list(matrix()), indirect=["scene"])
def test_one_falls_while_the_holder_is_at(
    scene: Scene, point: str, victim: str, fault: str
) -> None:
    # A dead holder's region ends by its death, a stopped one's by its limits.
    stops = victim == "holder" and fault == "stop"
    short = {"max_hold": 0.2, "drain_timeout": 0.1} if stops else {}
    scene.machine.environment["KREX_MAX_CLOSED"] = "1e-6" if point == "opened" else "1000"
    queue = Queue(scene, point, **short)
    actors = {"holder": queue.holder, "sibling": queue.sibling, "waiter": queue.waiter}
    machine, number = scene.machine, SIGNALS[fault]
    pair = machine.supervisor()
    if victim == "pair":
        machine.kill_supervisor()
    elif victim in ("keeper", "worker"):
        os.kill(pair["pid" if victim == "keeper" else "worker_pid"], number)
    else:
        scene.signal(actors[victim].pid, number)
    fallen = actors.pop(victim, None)
    if victim != "holder":
        # What the victim had done by then decides whether its region was revoked.
        queue.holder.signal(CONTINUE)
    verdicts = {name: outcome(actor) for name, actor in actors.items()}
    assert verdicts.get("waiter") in (None, "clean", "contended"), verdicts
    if fallen is not None and fault == "kill":
        fallen.process.wait(LIMIT)
    elif fallen is not None:
        scene.is_released()  # Nobody waits for it.
        epoch = queue.waiter.do("hold", timeout=LIMIT)["epoch"] if victim == "holder" else 0
        scene.signal(fallen.pid, CONTINUE)
        if victim == "holder":
            # It goes on within another's region: frozen, or, where the signal that continued it
            # undid that, running. It can do no harm to it.
            # One that had not begun claims again, behind the waiter.
            early = point in ("granted", "closing", "frozen")
            learnt = outcome(fallen) if machine.freezer == "sigstop" and not early else None
            device = machine.device()
            assert (device["epoch"], device["holder"], device["phase"]) == (epoch, "waiter", "held")
            assert leave(queue.waiter) in ("clean", "contended")
            expected = ("clean",) if point in ("handed_over", "opened") else ("revoked",)
            expected = ("clean", "contended") if early else expected
            assert (learnt or outcome(fallen)) in expected
        else:
            outcome(fallen)
        actors[victim] = fallen
    scene.works(*actors.values())
    if victim == "keeper":
        # What was stopped could not take over if the worker died next.
        wait_until(lambda: not is_running(pair["pid"]), "the keeper is replaced")


# --- the supervisor, in the middle of its work ---

# What a worker does, at which of the eight steps.
WORK = {
    "draining": "4 waits for a sibling's submission",
    "freezing": "5 has begun to freeze",
    "acknowledging": "5 has frozen, and not said so",
    "verifying": "8 looks whether all are frozen still",
    "thawing": "8 is about to thaw",
    "thawed": "8 has thawed, and not said so",
}


@pytest.mark.parametrize("fault", SIGNALS)
@pytest.mark.parametrize("point", WORK)
@pytest.mark.parametrize("scene", ["cgroup2", "sigstop"], indirect=True)
def test_a_worker_falls_while(scene: Scene, point: str, fault: str) -> None:
    holder, first, second = (scene.actor(name) for name in ("holder", "first", "second"))
    if point == "draining":
        first.do("begin_submission")
    scene.arm("supervisor", point, fault)
    holder.send("whole", drain_timeout=LIMIT)
    if point == "draining":
        wait_until(lambda: scene.has_fallen("supervisor"))
        first.send("end_submission")
        assert outcome(holder) in ("clean", "contended")
        first.answer()
    else:
        assert outcome(holder) in ("clean", "contended")
    wait_until(lambda: scene.has_fallen("supervisor"))
    scene.works(holder, first, second)


@pytest.mark.parametrize("fault", SIGNALS)
@pytest.mark.parametrize("scene", ["cgroup2", "sigstop"], indirect=True)
def test_a_worker_falls_while_it_revokes(scene: Scene, fault: str) -> None:
    holder, sibling = scene.actor("holder"), scene.actor("sibling")
    holder.do("hold")
    scene.arm("supervisor", "revoking", fault)
    holder.kill()
    wait_until(lambda: scene.has_fallen("supervisor"))
    scene.works(sibling)


@pytest.mark.parametrize("fault", SIGNALS)
@pytest.mark.parametrize("scene", ["cgroup2", "sigstop"], indirect=True)
def test_a_keeper_falls_while_it_takes_over(scene: Scene, fault: str) -> None:
    """Both halves at once, as good as: whoever waits starts another pair."""
    holder, sibling = scene.actor("holder"), scene.actor("sibling")
    holder.do("hold")
    scene.arm("supervisor", "taking_over", fault)
    os.kill(scene.machine.supervisor()["worker_pid"], KILL)
    wait_until(lambda: scene.has_fallen("supervisor"))
    if fault == "stop":
        pair = scene.machine.supervisor_processes()
        wait_until(lambda: all(process_state(pid) == "T" for pid in pair))
        scene.machine.signal_supervisor(CONTINUE)
    leave(holder)
    if fault == "kill":
        last = scene.actor("next")
        last.do("whole", timeout=LIMIT)
        last.quit()
    scene.works(holder, sibling)


# --- siblings and waiters, at places of their own ---


@pytest.mark.parametrize("fault", SIGNALS)
def test_a_sibling_falls_with_a_submission_in_flight(scene: Scene, fault: str) -> None:
    """Dead, it is not waited for. Stopped, it is, for so long as `drain_timeout` says."""
    holder, sibling = scene.actor("holder"), scene.actor("sibling")
    sibling.do("begin_submission")
    holder.send("whole", drain_timeout=LIMIT if fault == "kill" else 0.1)
    wait_until(lambda: scene.machine.device()["phase"] in ("closing", "held"))
    scene.signal(sibling.pid, SIGNALS[fault])
    report = holder.answer()
    if fault == "kill":
        sibling.process.wait(LIMIT)
        assert report["verdict"] == "clean", report
        scene.works(holder)
        return
    assert report["verdict"] == "contended"
    assert "sibling was not drained: 1 in flight after drain_timeout" in report["reasons"]
    scene.is_released()
    scene.signal(sibling.pid, CONTINUE)
    sibling.do("end_submission")
    scene.works(holder, sibling)


def test_a_child_of_a_sibling_dies_with_a_submission_in_flight(scene: Scene) -> None:
    """Its tenant lives on, so that its slots are not given back with the tenant's."""
    holder, sibling = scene.actor("holder"), scene.actor("sibling")
    code = "import krex; krex.submission().__enter__(); print(flush=True); input()"
    start = f"""
import subprocess, sys
pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child = subprocess.Popen([sys.executable, "-c", {code!r}], **pipes)
child.stdout.readline()
entered.append(child)
"""
    sibling.do("run", code=start)
    holder.send("whole", drain_timeout=LIMIT)
    wait_until(lambda: scene.machine.device()["phase"] == "closing")
    assert holder.poll_answer(0.05) is None, "it waits for the child"
    sibling.do("run", code="child = entered.pop(); child.kill(); child.communicate()")
    assert holder.answer()["verdict"] == "clean"
    scene.works(holder, sibling)


@pytest.mark.parametrize("fault", SIGNALS)
@pytest.mark.parametrize(("point", "word"), [("turned_back", "submit"), ("queued", "whole")])
def test_one_falls_as_it_is_turned_back(scene: Scene, point: str, word: str, fault: str) -> None:
    """Sibling or waiter, at the closed gate or in the queue."""
    holder, other = scene.actor("holder"), scene.actor("other")
    other.do("submit")
    scene.arm("holder", "granted", "stop")
    holder.send("whole")
    scene.wait_for_stop(holder, "holder")
    scene.arm("other", point, fault)
    other.send(word, timeout=LIMIT)
    wait_until(lambda: scene.has_fallen("other"))
    scene.signal(other.pid, SIGNALS[fault])
    holder.signal(CONTINUE)
    assert outcome(holder) in ("clean", "revoked")  # The latter on a slow machine.
    holder.do("whole", timeout=LIMIT)
    scene.is_released()
    if fault == "kill":
        other.process.wait(LIMIT)
        scene.works(holder)
        return
    scene.signal(other.pid, CONTINUE)
    other.answer()
    scene.works(holder, other)


@pytest.mark.parametrize("fault", SIGNALS)
@pytest.mark.parametrize("point", ["registering", "registered", "admitted"])
@pytest.mark.parametrize("scene", ["cgroup2", "sigstop"], indirect=True)
def test_a_command_falls_before_it_starts(scene: Scene, point: str, fault: str) -> None:
    sibling = scene.actor("sibling")
    scene.arm("newcomer", point, fault)
    environment = {"KREX_FAULT": f"@{scene.directory / 'newcomer'}"}
    newcomer = scene.machine.start([KREX, "run", "--", "true"], env=environment)
    wait_until(lambda: scene.has_fallen("newcomer"))
    if fault == "stop":
        wait_until(lambda: process_state(newcomer.pid) == "T")
        sibling.do("whole", timeout=LIMIT)
        newcomer.send_signal(CONTINUE)
    assert newcomer.wait(LIMIT) == (-KILL if fault == "kill" else 0)
    scene.works(sibling)


def test_a_command_waits_for_a_region_that_comes(scene: Scene, tmp_path: Path) -> None:
    """The holder is on its way, and has frozen nobody yet."""
    holder, started = scene.actor("holder"), tmp_path / "started"
    holder.do("submit")
    scene.arm("holder", "granted", "stop")
    holder.send("whole")
    scene.wait_for_stop(holder, "holder")
    machine = scene.machine
    command = machine.start([KREX, "run", "--name", "late", "--", "touch", str(started)])
    tenants = machine.tenants

    def waits() -> bool:
        return any(it["name"] == "late" and it["waiting"] for it in tenants().values())

    wait_until(lambda: waits() or command.poll() is not None, "it comes to the gate")
    ran = started.exists()
    # It may have waited for longer than a holder may take from its grant to closing the gate.
    assert not ran or machine.device()["phase"] == "open"
    holder.signal(CONTINUE)
    outcome(holder)
    assert command.wait(LIMIT) == 0
    assert started.exists()
    scene.works(holder)


def test_turns_are_taken_in_the_order_of_the_queue(scene: Scene) -> None:
    """Whoever is thawed late is overtaken, on a busy machine: so one round of a few must do."""
    machine = scene.machine
    blocker = scene.actor("blocker")
    # In the order in which they come: that of their slots, in which they are thawed.
    waiters = [(scene.actor(f"waiter {number}"), number // 2) for number in range(6)]
    for actor, _ in waiters:
        actor.do("submit")

    def is_queued(count: int) -> bool:
        device = machine.device()
        return len(device["queue"]) == count or device["phase"] != "granted"

    def is_in_order() -> bool:
        scene.arm("blocker", "granted", "stop")
        blocker.send("whole")
        scene.wait_for_stop(blocker, "blocker")
        for number, (actor, priority) in enumerate(waiters):
            actor.send("whole", timeout=LIMIT, priority=priority)
            wait_until(lambda number=number: is_queued(number + 1))
        blocker.signal(CONTINUE)
        outcome(blocker)
        epochs = [(actor.answer()["epoch"], number) for number, (actor, _) in enumerate(waiters)]
        return [number for _, number in sorted(epochs)] == [4, 5, 2, 3, 0, 1]

    assert any(is_in_order() for _ in range(4))


# --- by plain signals, whenever ---


@pytest.mark.parametrize("scene", ["cgroup2", "sigstop"], indirect=True)
def test_an_outsiders_continue_shows_in_the_verdict(scene: Scene) -> None:
    """A sibling that somebody continued, or thawed, within the region."""
    holder, sibling = scene.actor("holder"), scene.actor("sibling")
    holder.do("hold")
    if scene.machine.freezer == "sigstop":
        sibling.signal(CONTINUE)
    else:
        (group,) = [it for it in scene.machine.own_groups() if is_in(sibling.pid, it)]
        (group / "cgroup.freeze").write_text("0")
    report = holder.do("leave")
    assert report["verdict"] == "contended"
    assert any("ran during the region" in it for it in report["reasons"]), report
    scene.works(holder, sibling)


def is_in(pid: int, group: Path) -> bool:
    return str(pid) in (group / "cgroup.procs").read_text().split()


@pytest.mark.parametrize("scene", ["cgroup2", "sigstop"], indirect=True)
def test_each_half_falls_again_and_again(scene: Scene) -> None:
    holder, sibling = scene.actor("holder"), scene.actor("sibling")
    holder.do("hold")
    for half in ("pid", "worker_pid") * 3:
        old = scene.machine.supervisor()
        os.kill(old[half], KILL)
        wait_until(lambda old=old: new_pair(scene.machine, old), "the pair is whole again")
    leave(holder)
    scene.works(holder, sibling)


def new_pair(machine: Machine, old: dict[str, Any]) -> bool:
    now = machine.supervisor()
    pids = (now["pid"], now["worker_pid"])
    return now["worker_pid"] != old["worker_pid"] and machine.supervisor_processes() == sorted(pids)
