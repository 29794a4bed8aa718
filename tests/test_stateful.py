"""Schedules of real processes, drawn by Hypothesis, against the model in model.py.

A schedule starts tenants (under `krex run`, bare, or as children of others) and has them claim,
submit, leave, run into time-outs and `max_hold`, stop, continue and die, with either half of the
supervisor dying or stopping between. After each step the model says what must hold and what has
still to happen; a hasty step does not wait for the latter. At the end everybody is let go, and
must come to an end.

`KREX_TEST_SCHEDULES` says how many schedules (300), `KREX_TEST_SHRINK=1` looks for the shortest
one that fails, which takes long where failing means waiting in vain.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import krex
import pytest
from actors import Nursery, Remote, has_ended
from harness import Machine, is_frozen
from harness import wait_until as wait_at_most
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from model import CLAIM, STARVED, SUBMISSIONS, Model, Operation, Process, View, ViolationError

SCHEDULES = int(os.environ.get("KREX_TEST_SCHEDULES", "300"))
STEPS = 10
# What has to happen happens within this, on the busiest machine.
PATIENCE = float(os.environ.get("KREX_TEST_PATIENCE", "30"))
MOST = 5
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])
OTHER = "cpu:b"
FREEZERS = ["cgroup2", "sigstop"]


def wait_until(predicate: Callable[[], T], what: str) -> T:
    return wait_at_most(predicate, what, PATIENCE)


class Arena:
    """A runtime directory, its supervisor, and a nursery: shared by many schedules."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.nursery = Nursery(str(self.machine.runtime_dir), self.machine.environment, self.stderr)
        # The supervisor stays as long as it has a tenant; this one is in nobody's way.
        self.keeper = self.nursery.start(["--device", "cpu:kept"], {"KREX_LOG": "info"})
        self.number = 0
        wait_until(self.has_supervisor, "the supervisor runs")

    def snapshot(self) -> dict[str, Any]:
        return krex.snapshot(str(self.machine.runtime_dir))

    def log(self) -> str:
        """What the supervisor wrote."""
        path = self.machine.runtime_dir / "krex.log"
        return path.read_text() if path.exists() else ""

    def has_supervisor(self) -> dict[str, Any] | None:
        """The pair, if both halves run."""
        for it in self.snapshot()["supervisors"]:
            halves = {it["pid"], it["worker_pid"]}
            if it["alive"] and len(halves) == 2 and not any(map(has_ended, halves)):
                return dict(it)
        return None

    def end(self, remote: Remote) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(remote.pid, signal.SIGKILL)

    def clear(self) -> None:
        """End all actors, also those that connect late, and wait until krex has noticed."""
        remotes = self.nursery.remotes
        del remotes[self.keeper.pid]
        for remote in remotes.values():
            self.end(remote)
        wait_until(lambda: all(map(has_ended, remotes)), "actors have ended")
        self.nursery.forget()
        self.nursery.remotes[self.keeper.pid] = self.keeper

        def is_clear() -> bool:
            self.nursery.look()
            for pid, remote in self.nursery.remotes.items():
                if pid != self.keeper.pid:
                    self.end(remote)
            return [it["pid"] for it in self.snapshot()["tenants"]] == [self.keeper.pid]

        wait_until(is_clear, "I7: all slots are given back")

    def abandon(self) -> None:
        """End everything, by force: something went wrong, and may stand in the way."""
        for remote in self.nursery.remotes.values():
            self.end(remote)
        self.nursery.close()
        self.machine.kill_supervisor()
        self.machine.krex("recover", "--purge")
        shutil.rmtree(self.machine.runtime_dir, ignore_errors=True)
        self.stderr.close()

    def close(self) -> None:
        self.end(self.keeper)
        for remote in self.nursery.remotes.values():
            self.end(remote)
        self.nursery.close()
        self.machine.close()
        self.stderr.close()


class Shared:
    """The arena in use; a schedule that fails leaves it behind."""

    arena: Arena | None = None
    schedules = 0
    decisions = 0

    @classmethod
    def get(cls) -> Arena:
        if cls.arena is None:
            cls.arena = Arena()
        return cls.arena

    @classmethod
    def drop(cls, is_sound: bool = True) -> None:
        arena, cls.arena = cls.arena, None
        if arena is None:
            return
        if is_sound:
            arena.close()
        else:
            arena.abandon()


many = st.integers(0, 59)
hasty = st.sampled_from([False, False, True])
devices = st.sampled_from(["cpu", "cpu", "cpu", OTHER])
kinds = st.tuples(st.booleans(), st.sampled_from(FREEZERS))
timeouts = st.sampled_from([None, None, 0.05, 0.2])


# What can happen in a step, and with which arguments.
RULES: dict[str, dict[str, st.SearchStrategy[Any]]] = {}


def rule(**arguments: st.SearchStrategy[Any]) -> Callable[[F], F]:
    def register(function: F) -> F:
        RULES[function.__name__] = arguments
        return function

    return register


class Schedule:
    def __init__(self) -> None:
        self.arena = Shared.get()
        self.model = Model(self.is_starved)
        self.remotes: dict[int, Remote] = {}
        self.is_sound = True
        self.story: list[str] = []
        self.began = time.monotonic()
        self.statuses: dict[Process, int] = {}
        # Since then another fault of the supervisor would be a double one.
        self.hit: tuple[dict[str, Any], float] | None = None
        Shared.schedules += 1

    # --- the machinery ---

    def tell(self, line: str) -> None:
        self.story.append(f"{time.monotonic():.4f} {line}")

    @contextlib.contextmanager
    def step(self, is_hasty: bool = False) -> Iterator[None]:
        """A step, and the checks after it."""
        was_sound, self.is_sound = self.is_sound, False
        try:
            yield
            if is_hasty:
                self.look()
            else:
                self.settle()
        except AssertionError as error:
            story = "\n".join(self.story)
            log = "\n".join(self.arena.log().splitlines()[-30:])
            text = f"{error}\n\nwhat happened:\n{story}\n\nkrex.log:\n{log}"
            raise AssertionError(text) from error
        self.is_sound = was_sound

    def view(self) -> View:
        at = time.monotonic()
        return View.of(self.arena.snapshot(), at)

    def look(self) -> View:
        """Takes in all answers, then judges the state."""
        self.arena.nursery.look()
        for process in self.model.alive():
            self.hear(process)
        view = self.view()
        self.model.observe(view)
        return view

    def hear(self, process: Process) -> None:
        remote = self.remotes[process.pid]
        while (outcome := remote.outcome()) is not None:
            if process.operation is None or process.operation.word != "say":
                self.tell(f"{process}: {outcome}")
            word = process.operation.word if process.operation else None
            self.model.answer(process, outcome, self.view())
            if word == "fork":
                self.adopt(process, outcome["value"])
        operation = process.operation
        is_leaving = operation is not None and operation.word == "leave_code"
        if has_ended(process.pid):
            if not is_leaving:
                raise ViolationError(f"I8: {process} ended by itself")
            self.bury(process, operation.sent if operation else 0.0)

    def bury(self, process: Process, killed_at: float) -> None:
        self.tell(f"{process} has ended")
        self.model.ended(process, killed_at, time.monotonic())

    def adopt(self, parent: Process, pid: int) -> None:
        child = Process(pid, "child", None, set(), parent, parent.freezer)
        self.model.processes.append(child)
        self.remotes[pid] = self.arena.nursery.expect(pid)
        self.model.send(child, Operation("start", time.monotonic()), self.view())

    def settle(self) -> None:
        """Waits until everything has happened that must."""
        deadline = time.monotonic() + PATIENCE
        patience = time.monotonic() + 1
        while True:
            view = self.look()
            now = time.monotonic()
            missing = self.model.unmet(view, is_frozen, now)
            if not missing:
                return
            if now > patience:
                patience = now + 1
                self.tell(f"still missing: {missing}")
                for region in self.model.current.values():
                    if region.is_active() and self.is_starved(region.process):
                        region.was_stopped = True  # Its siblings were let go for it.
            if now > deadline:
                raise ViolationError(
                    f"not within {PATIENCE} s: {missing}; {view.devices}; {view.tenants}"
                )
            time.sleep(0.002)

    def is_starved(self, process: Process) -> bool:
        """Whether the holder got no CPU for so long that it may have been taken for stalled."""
        remote = self.remotes[process.pid]
        if not process.is_alive or process.is_stopped or process.operation is not None:
            return False
        remote.send("starved")
        outcome = wait_until(remote.outcome, f"{process} says whether it starved")
        self.tell(f"{process} starved for {outcome['value']:.3f} s")
        return bool(outcome["value"] > STARVED)

    def send(self, process: Process, operation: Operation, word: str, **arguments: Any) -> None:
        self.tell(f"{process} < {word} {arguments}")
        self.model.send(process, operation, self.view())
        self.remotes[process.pid].send(word, **arguments)

    def order(self, process: Process, word: str, **arguments: Any) -> None:
        device = arguments.get("device", "cpu")
        timeout = arguments.get("timeout")
        operation = Operation(word, time.monotonic(), device, timeout)
        self.send(process, operation, word, **arguments)

    def roots(self) -> list[Process]:
        return [it for it in self.model.alive() if it.parent is None]

    def idle(self) -> list[Process]:
        return [it for it in self.model.alive() if it.operation is None]

    def choose(self, candidates: list[Process], number: int) -> Process:
        return candidates[number % len(candidates)]

    # --- rules ---
    #
    # A schedule is drawn as a whole, before anything runs: what is drawn must not depend on who
    # was faster (with the preconditions and bundles of `RuleBasedStateMachine` it would). So a
    # rule that nobody is there for does another thing.

    def begin(self, is_run: bool, device: str, freezer: str) -> None:
        self.arena.number += 1
        environment = {"KREX_FREEZER": freezer}
        if not is_run:
            remote = self.arena.nursery.start(None, environment)
            process = Process(remote.pid, "bare", None, {"cpu"}, freezer=freezer)
        else:
            name = f"tenant {self.arena.number} (a)"
            options = ["--name", name, "--device", device]
            remote = self.arena.nursery.start(options, environment)
            process = Process(remote.pid, "run", name, {device}, freezer=freezer)
        self.tell(f"start {process} {device} {freezer}")
        self.model.processes.append(process)
        self.remotes[remote.pid] = remote
        self.model.send(process, Operation("start", time.monotonic()), self.view())

    def begin_some(self, kinds: list[tuple[bool, str]], has_child: bool, has_flight: bool) -> None:
        with self.step():
            for is_run, freezer in kinds:
                self.begin(is_run, "cpu", freezer)
        if has_child and self.parents():
            with self.step():
                self.order(self.parents()[0], "fork", path=self.arena.nursery.path)
        if has_flight:
            with self.step():
                self.order(self.idle()[1], "begin_submission", device="cpu")

    @rule(is_run=st.booleans(), device=devices, freezer=st.sampled_from(FREEZERS), is_hasty=hasty)
    def start(self, is_run: bool, device: str, freezer: str, is_hasty: bool) -> None:
        with self.step(is_hasty):
            if len(self.model.alive()) < MOST:
                self.begin(is_run, device, freezer)

    def parents(self) -> list[Process]:
        tenants = self.arena.snapshot()["tenants"]
        attached = {it["pid"] for it in tenants}
        return [it for it in self.idle() if it.parent is None and it.pid in attached]

    @rule(number=many, is_hasty=hasty)
    def fork(self, number: int, is_hasty: bool) -> None:
        if len(self.model.alive()) == MOST or not self.parents():
            self.move_on(number, is_hasty)
            return
        with self.step(is_hasty):
            self.order(self.choose(self.parents(), number), "fork", path=self.arena.nursery.path)

    @rule(
        number=many,
        device=devices,
        timeout=timeouts,
        priority=st.sampled_from([0, 0, 1, -1]),
        max_hold=st.sampled_from([60.0, 60.0, 0.1]),
        drain_timeout=st.sampled_from([0.05, 0.3]),
        is_hasty=hasty,
    )
    def claim(
        self,
        number: int,
        device: str,
        timeout: float | None,
        priority: int,
        max_hold: float,
        drain_timeout: float,
        is_hasty: bool,
    ) -> None:
        if not self.idle():
            self.move_on(number, is_hasty)
            return
        process = self.choose(self.idle(), number)
        if process.regions:
            device = process.regions[0].device
        with self.step(is_hasty):
            now = time.monotonic()
            limits = (max_hold, drain_timeout)
            operation = Operation(CLAIM, now, device, timeout, priority, *limits)
            self.send(
                process,
                operation,
                CLAIM,
                device=device,
                timeout=timeout,
                priority=priority,
                max_hold=max_hold,
                drain_timeout=drain_timeout,
            )

    @rule(
        priorities=st.lists(st.sampled_from([0, 0, 0, 1, -1]), min_size=MOST, max_size=MOST),
        is_hasty=hasty,
    )
    def rush(self, priorities: list[int], is_hasty: bool) -> None:
        """All claim at once: some get into the queue before they are frozen."""
        with self.step(is_hasty):
            for process, priority in zip(self.idle(), priorities, strict=False):
                if not process.regions:
                    operation = Operation(CLAIM, time.monotonic(), "cpu", None, priority)
                    self.send(process, operation, CLAIM, device="cpu", priority=priority)

    def holders(self) -> list[Process]:
        return [it for it in self.idle() if it.regions]

    @rule(number=many, is_hasty=hasty)
    def leave(self, number: int, is_hasty: bool) -> None:
        if not self.holders():
            self.move_on(number, is_hasty)
            return
        with self.step(is_hasty):
            self.order(self.choose(self.holders(), number), "leave")

    @rule(
        number=many,
        device=devices,
        word=st.sampled_from(SUBMISSIONS),
        timeout=timeouts,
        is_hasty=hasty,
    )
    def submit(
        self, number: int, device: str, word: str, timeout: float | None, is_hasty: bool
    ) -> None:
        if not self.idle():
            self.move_on(number, is_hasty)
            return
        # Whoever runs while a region is held is of most interest: the holder's ancestors.
        ancestors = [it.parent for it in self.model.alive() if it.regions and it.parent]
        ancestors = [it for it in ancestors if it in self.idle() and not it.regions]
        is_theirs = ancestors and number % 2
        process = self.choose(ancestors if is_theirs else self.idle(), number)
        if process.regions:
            device = process.regions[0].device  # Elsewhere it would wait, as a holder.
        with self.step(is_hasty):
            self.order(process, word, device=device, timeout=timeout)

    def submitters(self) -> list[Process]:
        return [it for it in self.idle() if it.flights]

    @rule(number=many, is_hasty=hasty)
    def end_submission(self, number: int, is_hasty: bool) -> None:
        if not self.submitters():
            self.move_on(number, is_hasty)
            return
        with self.step(is_hasty):
            process = self.choose(self.submitters(), number)
            operation = Operation("end_submission", time.monotonic(), process.flights[-1].device)
            self.send(process, operation, "end_submission")

    @rule(
        number=many,
        phase=st.sampled_from([None, "compiling", "warming_up", "idle"]),
        is_hasty=hasty,
    )
    def work(self, number: int, phase: str | None, is_hasty: bool) -> None:
        if not self.idle():
            self.move_on(number, is_hasty)
            return
        process = self.choose(self.idle(), number)
        with self.step(is_hasty):
            if phase is None:
                self.order(process, "ping")
            else:
                operation = Operation("say", time.monotonic(), detail=phase)
                self.send(process, operation, "say", phase=phase)

    def runners(self) -> list[Process]:
        return [it for it in self.model.alive() if not it.is_stopped]

    @rule(number=many, is_hasty=hasty)
    def stop(self, number: int, is_hasty: bool) -> None:
        if not self.runners():
            self.move_on(number, is_hasty)
            return
        runners = self.runners()
        holders = [it for it in runners if it.regions]
        process = self.choose(holders if holders and number % 2 else runners, number)
        with self.step(is_hasty):
            self.look()
            if process.is_alive:
                self.tell(f"stop {process}")
                self.model.stop(process, self.view())
                os.kill(process.pid, signal.SIGSTOP)

    def stopped(self) -> list[Process]:
        return [it for it in self.model.alive() if it.is_stopped]

    @rule(number=many, is_hasty=hasty)
    def resume(self, number: int, is_hasty: bool) -> None:
        if not self.stopped():
            self.move_on(number, is_hasty)
            return
        with self.step(is_hasty):
            self.let_run(self.choose(self.stopped(), number))

    def let_run(self, process: Process) -> None:
        self.tell(f"continue {process}")
        self.model.resume(process)
        os.kill(process.pid, signal.SIGCONT)

    @rule(number=many, is_hasty=hasty)
    def kill(self, number: int, is_hasty: bool) -> None:
        with self.step(is_hasty):
            self.look()
            if self.model.alive():
                self.end(self.choose(self.model.alive(), number))

    def end(self, process: Process) -> None:
        killed_at = time.monotonic()
        self.tell(f"kill {process}")
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: has_ended(process.pid), f"I7: {process} dies when it is killed")
        if self.statuses.pop(process, None) is None:  # Else it may have been faster.
            self.statuses[process] = -signal.SIGKILL
        self.bury(process, killed_at)

    @rule(number=many, code=st.sampled_from([0, 3]), is_hasty=hasty)
    def exit(self, number: int, code: int, is_hasty: bool) -> None:
        if not self.idle():
            self.move_on(number, is_hasty)
            return
        with self.step(is_hasty):
            process = self.choose(self.idle(), number)
            self.statuses[process] = code
            self.order(process, "leave_code", code=code)

    @rule(half=st.sampled_from(["pid", "worker_pid"]), is_stop=st.booleans(), is_hasty=hasty)
    def hit_supervisor(self, half: str, is_stop: bool, is_hasty: bool) -> None:
        with self.step(is_hasty):
            self.recovered()
            pair = wait_until(self.arena.has_supervisor, "both halves run")
            self.tell(f"{'stop' if is_stop else 'kill'} the supervisor's {half}: {pair}")
            hit_at = time.monotonic()
            os.kill(pair[half], signal.SIGSTOP if is_stop else signal.SIGKILL)
            self.hit = (pair, hit_at)
            if not is_hasty:
                self.recovered()

    def recovered(self) -> None:
        """Waits until what was hit has been replaced."""
        if self.hit is None:
            return
        (before, hit_at), self.hit = self.hit, None

        def is_mended() -> bool:
            pair = self.arena.has_supervisor()
            halves = ("pid", "worker_pid")
            return pair is not None and any(pair[it] != before[it] for it in halves)

        wait_until(is_mended, "I3: the supervisor is mended")
        self.tell("the supervisor is mended")
        self.look()
        self.model.supervisor_was_replaced(hit_at)

    def ends(self) -> list[float]:
        """The times of the next time-outs, and ends of `max_hold`."""
        ends = [
            it.operation.sent + it.operation.timeout
            for it in self.model.alive()
            if it.operation is not None and it.operation.timeout is not None
        ]
        ends += [
            it.entered + it.max_hold
            for it in self.model.current.values()
            if it.is_active() and it.max_hold < 1
        ]
        now = time.monotonic()
        return [it for it in ends if it > now]

    @rule(number=many)
    def pass_time(self, number: int) -> None:
        """Until the next time-out or end of a `max_hold`; before, somebody asks for a short one."""
        candidates = [it for it in self.idle() if not it.regions]
        if not self.ends() and candidates:
            with self.step():
                process = self.choose(candidates, number)
                operation = Operation(CLAIM, time.monotonic(), "cpu", max_hold=0.1)
                self.send(process, operation, CLAIM, device="cpu", max_hold=0.1)
        with self.step():
            ends = self.ends()
            if ends:
                self.tell("time passes")
                time.sleep(max(0.0, min(ends) - time.monotonic()) + 0.01)

    def move_on(self, number: int, is_hasty: bool) -> None:
        """What is done where there is nobody to do what was drawn: something that is due."""
        with self.step(is_hasty):
            if self.holders():
                self.order(self.choose(self.holders(), number), "leave")
            elif self.idle():
                process = self.choose(self.idle(), number)
                operation = Operation(CLAIM, time.monotonic(), "cpu")
                self.send(process, operation, CLAIM, device="cpu")
            elif self.stopped():
                self.let_run(self.choose(self.stopped(), number))

    # --- the end ---

    def teardown(self) -> None:
        if not self.is_sound:
            Shared.drop(self.is_sound)
            return
        self.is_sound = False
        try:
            with self.step():
                self.let_go()
            with self.step():
                self.end_all()
            self.arena.clear()
            self.is_sound = True
        finally:
            if not self.is_sound:
                Shared.drop(self.is_sound)

    def let_go(self) -> None:
        """I4: once nothing stands in their way, all that wait must get what they wait for."""
        self.tell("all are let go")
        self.recovered()
        for process in self.stopped():
            self.let_run(process)
        deadline = time.monotonic() + PATIENCE
        while True:
            self.settle()
            waiting = [it for it in self.model.alive() if it.operation is not None]
            holding = [it for it in self.idle() if it.regions]
            flying = [it for it in self.idle() if it.flights and not it.regions]
            if not waiting and not holding and not flying:
                return
            for process in flying:
                device = process.flights[-1].device
                operation = Operation("end_submission", time.monotonic(), device)
                self.send(process, operation, "end_submission")
            for process in holding:
                self.order(process, "leave")
            if not holding and not flying:
                time.sleep(0.002)
            if time.monotonic() > deadline:
                raise ViolationError(f"I4: {[f'{it}: {it.operation}' for it in waiting]}")

    def end_all(self) -> None:
        for index, process in enumerate(self.model.alive()):
            if index % 2:
                self.end(process)
            else:
                self.statuses[process] = 7
                self.order(process, "leave_code", code=7)
        self.settle()
        for process, status in self.statuses.items():
            if process.parent is None:
                wait_until(
                    lambda it=process: self.arena.nursery.exit_status(it.pid) is not None,
                    f"the exit status of {process}",
                )
                found = self.arena.nursery.exit_status(process.pid)
                if found != status:
                    raise ViolationError(f"I8: {process} ended with {found}, not {status}")
        Shared.decisions += self.model.decisions


@pytest.fixture(scope="module", autouse=True)
def arena() -> Iterator[None]:
    """Ends what the schedules shared; nothing may be left, and nobody may have panicked."""
    began = time.monotonic()
    complaints = ""
    try:
        yield
        if Shared.arena is not None:
            Shared.arena.stderr.seek(0)
            complaints = Shared.arena.stderr.read().decode()
    finally:
        Shared.drop()
    spent = time.monotonic() - began
    print(f"{Shared.schedules} schedules in {spent:.1f} s, {Shared.decisions} turns judged")
    assert "panicked" not in complaints, complaints


beginnings = st.fixed_dictionaries(
    {
        "kinds": st.lists(kinds, min_size=2, max_size=3),
        "has_child": st.booleans(),
        "has_flight": st.booleans(),
    }
)
steps = st.one_of(
    [
        st.tuples(st.just(name), st.fixed_dictionaries(arguments))
        for name, arguments in RULES.items()
    ]
)
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
if os.environ.get("KREX_TEST_SHRINK"):
    PHASES.append(Phase.shrink)


@pytest.mark.timeout(max(1200, SCHEDULES * 4))
@settings(
    max_examples=SCHEDULES,
    deadline=None,
    database=None,
    print_blob=True,
    phases=PHASES,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(beginning=beginnings, schedule=st.lists(steps, min_size=STEPS - 4, max_size=STEPS))
def test_schedules(beginning: dict[str, Any], schedule: list[tuple[str, dict[str, Any]]]) -> None:
    actors = Schedule()
    try:
        actors.begin_some(**beginning)
        for name, arguments in schedule:
            getattr(actors, name)(**arguments)
    finally:
        actors.teardown()
