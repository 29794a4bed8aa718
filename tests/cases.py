"""Cases that an actor runs in its own process: see `Actor.call`. Each asserts plainly."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import krex
from krex import region


@contextmanager
def raises(kind: type[BaseException], *words: str) -> Iterator[list[BaseException]]:
    """The block raises `kind` itself, no subclass, with all the words in its message."""
    caught: list[BaseException] = []
    try:
        yield caught
    except BaseException as error:
        caught.append(error)
    assert [type(it) for it in caught] == [kind], f"{caught} instead of {kind.__name__}"
    for word in words:
        assert word in str(caught[0]), f"{word!r} is not in {caught[0]}"


def wait_for(predicate: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not predicate():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def phase_of(device: str = "cpu") -> str:
    devices = {it["name"]: it for it in krex.snapshot()["devices"]}
    return str(devices[device]["phase"]) if device in devices else "open"


def own_tenant() -> dict[str, Any]:
    (tenant,) = [it for it in krex.snapshot()["tenants"] if it["pid"] == os.getpid()]
    return dict(tenant)


def nothing_is_held() -> None:
    """The turn among threads, the queue and the gate are free: a region works at once."""
    with region.critical(timeout=10) as again:
        pass
    assert not again.report.joined
    assert phase_of() == "open"


# Using it


def nested_in_its_thread() -> None:
    outer = region.critical()
    with outer, region.critical() as inner:
        assert inner.epoch == outer.epoch
        with outer:
            assert outer.epoch == inner.epoch
        assert outer.report.joined
        assert phase_of() == "held"
    assert inner.report.joined
    assert not outer.report.joined
    assert outer.report.epoch == inner.report.epoch
    assert phase_of() == "open"


def other_threads_queue() -> None:
    inside: list[int] = []
    overlapped: list[int] = []
    epochs: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            with region.critical() as timed:
                inside.append(number)
                if inside != [number]:
                    overlapped.append(number)
                time.sleep(0)
                epochs.append(timed.epoch)
                inside.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert overlapped == []
    assert sorted(epochs) == epochs
    assert len(set(epochs)) == 80


def a_thread_times_out() -> None:
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            with region.critical(timeout=0.05):
                pass
        except BaseException as error:
            outcome.append(error)

    with region.critical():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [type(it) for it in outcome] == [region.RegionTimeout]
    assert isinstance(outcome[0], TimeoutError)
    nothing_is_held()


def one_object_in_many_threads() -> None:
    shared = region.critical()
    inside: list[int] = []

    def work(number: int) -> None:
        for _ in range(10):
            with shared:
                inside.append(number)
                assert inside == [number]
                inside.remove(number)

    errors: list[Any] = []
    hook, threading.excepthook = threading.excepthook, errors.append
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threading.excepthook = hook
    assert errors == []
    nothing_is_held()


def decorated() -> None:
    phases: list[str] = []

    @region.critical(label="decorated")
    def function(number: int, *, word: str = "x") -> str:
        """Doc."""
        phases.append(phase_of())
        return word * number

    reports: list[region.Report] = []
    region.on_region_exited(reports.append)
    assert function(2) == "xx"
    assert function(1, word="y") == "y"
    region.remove_callback(reports.append)
    assert phases == ["held", "held"]
    assert (function.__name__, function.__doc__) == ("function", "Doc.")
    assert [it.label for it in reports] == ["decorated"] * 2
    assert reports[0].epoch < reports[1].epoch

    @region.critical()
    def recursive(depth: int) -> int:
        return 0 if depth == 0 else recursive(depth - 1) + 1

    assert recursive(5) == 5

    @region.critical()
    def failing() -> None:
        raise KeyError("mine")

    with raises(KeyError, "mine"):
        failing()
    nothing_is_held()


def deferred_bodies_are_refused() -> None:
    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None:
        await asyncio.sleep(0)

    async def asynchronous_generator() -> AsyncIterator[int]:
        yield 1

    for function in (generator, coroutine, asynchronous_generator):
        with raises(TypeError, "with krex.region.critical()"):
            region.critical()(function)
    nothing_is_held()


def inside_a_generator() -> None:
    def generator() -> Iterator[int]:
        with region.critical():
            yield 1
            yield 2

    assert list(generator()) == [1, 2]
    assert phase_of() == "open"
    unfinished = generator()
    next(unfinished)
    assert phase_of() == "held"
    del unfinished
    gc.collect()
    assert phase_of() == "open"
    nothing_is_held()


def forgotten() -> None:
    """A region whose object is gone is over."""
    critical = region.critical()
    critical.__enter__()
    assert phase_of() == "held"
    del critical
    gc.collect()
    assert phase_of() == "open"
    nothing_is_held()


def exceptions_pass_through() -> None:
    timed = region.critical()
    with raises(ZeroDivisionError), timed:
        _ = 1 / 0
    assert timed.report.verdict == "clean"
    with raises(SystemExit), timed:
        sys.exit(3)
    with raises(KeyboardInterrupt), timed:
        signal.raise_signal(signal.SIGINT)
    nothing_is_held()


def left_without_being_entered() -> None:
    with raises(region.RegionError, "not entered"):
        region.critical().__exit__(None, None, None)
    nothing_is_held()


# Callbacks


def callbacks() -> None:
    events: list[tuple[str, Any]] = []

    @region.on_region_entered
    def entered(critical: region.critical) -> None:
        events.append(("entered", critical.epoch, phase_of()))  # type: ignore[arg-type]

    @region.on_region_exited
    def exited(report: region.Report) -> None:
        events.append(("exited", report.epoch, phase_of()))  # type: ignore[arg-type]

    with region.critical() as timed:
        pass
    epoch = timed.report.epoch
    assert events == [("entered", epoch, "held"), ("exited", epoch, "open")]
    region.remove_callback(entered)
    region.remove_callback(exited)
    with region.critical():
        pass
    assert len(events) == 2
    with raises(ValueError, "not registered"):
        region.remove_callback(entered)


def failing_callbacks() -> None:
    @region.on_region_entered
    def entered(critical: region.critical) -> None:
        raise KeyError("entered")

    ran = []
    with raises(KeyError, "entered"), region.critical():
        ran.append(1)
    assert ran == []
    assert phase_of() == "open"
    region.remove_callback(entered)

    @region.on_region_exited
    def exited(report: region.Report) -> None:
        raise KeyError("exited")

    timed = region.critical()
    with raises(KeyError, "exited"), timed:
        ran.append(2)
    assert ran == [2]
    assert timed.report.verdict == "clean"
    region.remove_callback(exited)
    nothing_is_held()


def callbacks_of_a_callback() -> None:
    """A callback may register others, and take itself out."""
    seen: list[str] = []

    def exited(report: region.Report) -> None:
        seen.append("first")
        region.remove_callback(exited)
        region.on_region_exited(later)

    def later(report: region.Report) -> None:
        seen.append("later")

    region.on_region_exited(exited)
    with region.critical():
        pass
    assert seen == ["first"]
    with region.critical():
        pass
    assert seen == ["first", "later"]
    region.remove_callback(later)


# Reports


FIELDS = {
    "device": str,
    "epoch": int,
    "label": str,
    "joined": bool,
    "wait_s": float,
    "drain_s": float,
    "freeze_s": float,
    "isolate_s": float,
    "cpus": type(None),
    "isolation": str,
    "held_s": float,
    "restore_s": float,
    "time_excluded_s": float,
    "pending_at_exit_s": float,
    "submissions": int,
    "streams": int,
    "gpu": type(None),
    "clocks": type(None),
    "siblings": tuple,
    "verdict": str,
    "reasons": tuple,
    "freezer": str,
}


def report_fields() -> None:
    with region.critical(label="a label", priority=3) as timed:
        assert [it["label"] for it in krex.snapshot()["devices"]] == ["a label"]
        end = time.monotonic() + 0.02
        while time.monotonic() < end:
            pass
    report = timed.report
    values = report.to_dict()
    assert set(values) == set(FIELDS)
    for name, kind in FIELDS.items():
        value = getattr(report, name)
        assert type(value) is kind, name
        if kind is float:
            assert math.isfinite(value), name
            assert value >= 0, name
    assert report.held_s >= 0.02
    assert (report.device, report.label, report.joined) == ("cpu", "a label", False)
    assert (report.siblings, report.verdict, report.reasons) == ((), "clean", ())
    assert report.freezer in ("cgroup2", "sigstop")
    again = json.loads(json.dumps(values))
    for name in ("siblings", "reasons"):
        assert again[name] == []
    for attribute in ("device", "epoch", "verdict"):
        assert repr(getattr(report, attribute)) in repr(report) or str(
            getattr(report, attribute)
        ) in repr(report)
    with raises(AttributeError):
        report.verdict = "clean"  # type: ignore[misc]
    with region.critical() as unlabelled:
        pass
    assert unlabelled.report.label is None
    assert unlabelled.report.epoch > report.epoch


def report_too_early() -> None:
    timed = region.critical()
    with raises(region.RegionError, "after the block"):
        _ = timed.report
    with raises(region.RegionError):
        _ = timed.epoch
    with timed, raises(region.RegionError, "after the block"):
        _ = timed.report
    assert timed.report.verdict == "clean"
    nothing_is_held()


# Bad arguments


def bad_arguments() -> None:
    for name, value in itertools.product(
        ("timeout", "max_hold", "drain_timeout"),
        (-1.0, 0.0, -0.0, math.nan, math.inf, -math.inf, 1e300),
    ):
        with raises(ValueError, name, "positive"), region.critical(**{name: value}):
            pass
    for name in ("timeout", "max_hold", "drain_timeout"):
        with raises(TypeError), region.critical(**{name: "soon"}):
            pass
    for priority in (-129, 128, 10**6):
        with raises(ValueError, "priority", str(priority)), region.critical(priority=priority):
            pass
    for device in ("gpu", "", "cpu:", "cpu:a b", "-1", "cpu:\n", "gate:x"):
        with raises(krex.UnknownDevice, "cpu:NAME"), region.critical(device):
            pass
        with raises(krex.UnknownDevice, "cpu:NAME"), krex.submission(device):
            pass
    for timeout in (-1.0, 0.0, math.nan, math.inf):
        with raises(ValueError, "timeout", "positive"):
            krex.submission(timeout=timeout)
    with raises(ValueError, "idle, compiling or warming_up"):
        krex.phase("thinking")  # type: ignore[arg-type]
    for name in ("", "a b", "x" * 100):
        with raises(ValueError, "name"):
            krex.SharedMemoryGate(name)
        with raises(ValueError, "name"):
            krex.InFlightCounter(name)
    after = krex.snapshot()
    assert [it["pid"] for it in after["tenants"]].count(os.getpid()) == 1
    nothing_is_held()


def another_device_inside() -> None:
    with region.critical("cpu:one") as outer:
        with (
            raises(region.RegionError, "cpu:one", "cpu:two", "leave"),
            region.critical("cpu:two"),
        ):
            pass
        assert phase_of("cpu:one") == "held"
        assert phase_of("cpu:two") == "open"
    assert outer.report.verdict == "clean"
    nothing_is_held()


# Forks


def in_a_child(body: Callable[[], object]) -> None:
    """Run `body` in a forked child; it must succeed there."""
    await_child(start_child(body))


def start_child(body: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def await_child(child: int) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def a_fork_never_leaves_its_parents_region() -> None:
    timed = region.critical()
    with timed:
        epoch = timed.epoch

        def ends_by_exit() -> None:
            timed.__exit__(None, None, None)
            with raises(region.RegionError):
                _ = timed.report

        def ends_by_collection() -> None:
            nonlocal timed
            del timed
            gc.collect()

        for body in (ends_by_exit, ends_by_collection, lambda: None):
            in_a_child(body)
            assert phase_of() == "held"
    assert timed.report.epoch == epoch
    assert timed.report.verdict == "clean"
    nothing_is_held()


def a_fork_joins_its_parents_region() -> None:
    def joins() -> None:
        with region.critical() as inner:
            assert inner.epoch == timed.epoch
        assert inner.report.joined
        assert inner.report.epoch == timed.epoch
        with krex.submission():
            pass

    with region.critical() as timed:
        in_a_child(joins)
        assert phase_of() == "held"
    assert timed.report.verdict == "clean"
    assert not timed.report.joined
    nothing_is_held()


def a_fork_outside_of_a_region_is_excluded_by_its_parents() -> None:
    """A child that enters a region is a tenant of its own from then on."""
    with region.critical() as before:
        pass

    def enters() -> None:
        with region.critical() as own:
            assert own.epoch > before.report.epoch
        assert not own.report.joined

    in_a_child(enters)
    nothing_is_held()


def threads_and_forks() -> None:
    """A child that is forked while another thread holds the turn can use regions."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with region.critical():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)

    def joins() -> None:
        with region.critical(timeout=10) as inner:
            pass
        assert inner.report.joined

    in_a_child(joins)
    leave.set()
    thread.join()
    nothing_is_held()


# Revocation


def revoked_past_max_hold() -> None:
    timed = region.critical(max_hold=0.1)
    with raises(region.RegionRevoked, "max_hold", "void") as caught, timed:
        wait_for(lambda: phase_of() == "open")
    error = caught[0]
    assert isinstance(error, region.RegionRevoked)
    assert isinstance(error, region.RegionError)
    assert error.report is not None
    assert error.report.verdict == "revoked"
    assert error.report is timed.report
    assert "max_hold" in error.report.reasons[0]
    nothing_is_held()


def revoked_with_an_exception_of_its_own() -> None:
    timed = region.critical(max_hold=0.1)
    with raises(KeyError, "mine"), timed:
        wait_for(lambda: phase_of() == "open")
        raise KeyError("mine")
    assert timed.report.verdict == "revoked"
    nothing_is_held()


# Gate, counter, submissions, phases


def gate_of_one_process() -> None:
    gate, twin = krex.SharedMemoryGate("mine"), krex.SharedMemoryGate("mine")
    assert gate.name == "mine"
    assert gate.epoch == 0
    first = gate.try_claim()
    assert first == gate.epoch == twin.epoch == 1
    assert gate.try_claim() is None
    assert twin.try_claim() is None
    assert not gate.is_held_by_other
    with raises(region.RegionError, "mine"):
        twin.release()
    gate.release()
    with raises(region.RegionError, "mine"):
        gate.release()
    assert twin.try_claim() == 2
    twin.release()
    other = krex.SharedMemoryGate("other")
    assert other.epoch == 0
    assert gate.try_claim() == 3
    assert other.try_claim() == 1
    other.release()
    gate.release()


def counter_of_one_process() -> None:
    gate, counter = krex.SharedMemoryGate("mine"), krex.InFlightCounter("mine")
    assert (counter.name, counter.count, counter.total) == ("mine", 0, 0)
    with raises(region.RegionError, "in flight"):
        counter.leave()
    counter.enter()
    counter.enter(timeout=1)
    assert (counter.count, counter.total) == (2, 2)
    counter.leave()
    assert (counter.count, counter.total) == (1, 2)
    assert gate.try_claim() is not None
    counter.enter(timeout=5)  # its own gate
    assert counter.count == 2
    counter.leave()
    counter.leave()
    gate.release()
    assert (counter.count, counter.total) == (0, 3)
    for timeout in (-1.0, 0.0, math.nan, math.inf):
        with raises(ValueError, "timeout"):
            counter.enter(timeout=timeout)


def submissions_in_threads() -> None:
    def work() -> None:
        for _ in range(200):
            with krex.submission():
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shared = krex.submission()
    with shared, shared:
        pass
    with raises(RuntimeError, "not entered"):
        shared.__exit__(None, None, None)
    with region.critical(), krex.submission(), krex.submission("cpu:other"):
        pass
    nothing_is_held()


def submission_left_by_an_exception() -> None:
    with raises(KeyError), krex.submission():
        raise KeyError
    nothing_is_held()


def phases() -> None:
    krex.phase("compiling")
    assert own_tenant()["state"] == "compiling"
    with krex.phase("warming_up") as inner:
        assert own_tenant()["state"] == "warming_up"
        assert "warming_up" in repr(inner)
        with region.critical():
            assert own_tenant()["state"] == "in_critical_region"
            assert own_tenant()["phase"] == "warming_up"
    assert own_tenant()["state"] == "compiling"
    with raises(KeyError), krex.phase("idle"):
        raise KeyError
    assert own_tenant()["state"] == "compiling"
    krex.phase("idle")
    assert own_tenant()["state"] == "idle"


def no_threads_are_started() -> None:
    before = set(os.listdir("/proc/self/task"))
    with region.critical():
        assert set(os.listdir("/proc/self/task")) == before
        assert threading.active_count() == 1
    assert set(os.listdir("/proc/self/task")) == before


def interrupted_while_waiting(command: str, device: str) -> None:
    """Ctrl-C ends the wait for the turn; called while somebody else holds the region."""

    def interrupt() -> None:
        wait_for(lambda: os.getpid() in waiting())
        os.kill(os.getpid(), signal.SIGINT)

    def waiting() -> list[int]:
        return [it["pid"] for it in krex.snapshot()["tenants"] if it["waiting"]]

    thread = threading.Thread(target=interrupt)
    thread.start()
    waited = region.critical(device) if command == "region" else krex.submission(device)
    with raises(KeyboardInterrupt), waited:
        raise AssertionError("it was entered")
    thread.join()
    assert not any(it["queue"] for it in krex.snapshot()["devices"])
    assert waiting() == []


def claims(count: int) -> dict[str, Any]:
    """Claim and release a gate that others want too."""
    gate = krex.SharedMemoryGate("contended")
    epochs: list[int] = []
    spans: list[tuple[float, float]] = []
    deadline = time.monotonic() + 50
    while len(epochs) < count:
        assert time.monotonic() < deadline
        epoch = gate.try_claim()
        if epoch is None:
            time.sleep(0)
            continue
        start = time.monotonic()
        assert not gate.is_held_by_other
        spans.append((start, time.monotonic()))
        epochs.append(epoch)
        gate.release()
    return {"epochs": epochs, "spans": spans}


def fork_with_a_submission() -> None:
    """A child leaves nothing of its parent's, and counts its own."""
    counter = krex.InFlightCounter("mine")
    counter.enter()
    submission = krex.submission()

    def body() -> None:
        submission.__exit__(None, None, None)
        with raises(region.RegionError, "in flight"):
            counter.leave()
        counter.enter()
        assert counter.count == 2
        with krex.submission():
            pass
        os._exit(0)  # with its own still in flight

    with submission:
        in_a_child(body)
    wait_for(lambda: counter.count == 1)
    counter.leave()
    assert counter.count == 0
    nothing_is_held()


def many_regions(device: str, count: int) -> dict[str, Any]:
    spans: list[tuple[float, float]] = []
    verdicts: list[str] = []
    for _ in range(count):
        with region.critical(device) as timed:
            start = time.monotonic()
            while time.monotonic() < start + 0.001:
                pass
            spans.append((start, time.monotonic()))
        verdicts.append(timed.report.verdict)
    return {"spans": spans, "verdicts": verdicts}


# CPUs


class Helper:
    """A thread that does what it is told, in turn."""

    def __init__(self) -> None:
        self._words: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.tid: int = self.do(threading.get_native_id)

    def _run(self) -> None:
        while True:
            self._outcomes.put(self._words.get()())

    def do(self, body: Callable[[], Any]) -> Any:
        self._words.put(body)
        return self._outcomes.get(timeout=30)


helpers: list[Helper] = []


def start_helper(by: int | None = None, cpus: list[int] | None = None) -> int:
    """Start a thread, from that with the number `by`; returns its id."""
    helper = Helper() if by is None else helpers[by].do(Helper)
    helpers.append(helper)
    if cpus is not None:
        helper.do(lambda: os.sched_setaffinity(0, cpus))
    return int(helper.tid)


def choose_cpus(cpus: list[int], by: int | None = None) -> None:
    """The calling thread, or a helper, gives itself another mask."""
    if by is None:
        os.sched_setaffinity(0, cpus)
    else:
        helpers[by].do(lambda: os.sched_setaffinity(0, cpus))


def bear(by: int | None = None, cpus: list[int] | None = None) -> int:
    """Fork a child that only waits to be killed, from a helper's thread or the calling one."""

    def body() -> int:
        child = os.fork()
        if child == 0:
            if cpus is not None:
                os.sched_setaffinity(0, cpus)
            while True:
                signal.pause()
        return child

    return body() if by is None else int(helpers[by].do(body))


def region_that_raises() -> None:
    with raises(KeyError), region.critical():
        raise KeyError


def a_childs_region_is_joined() -> None:
    """A child that was born inside has its parent's CPUs, and changes nothing."""
    here = os.sched_getaffinity(0)

    def joins() -> None:
        with region.critical() as inner:
            assert os.sched_getaffinity(0) == here
        assert inner.report.joined
        assert inner.report.isolation != "none"
        assert os.sched_getaffinity(0) == here

    in_a_child(joins)


def a_childs_region_on_another_device() -> dict[str, Any]:
    """Its report."""
    read_end, write_end = os.pipe()

    def enters() -> None:
        with region.critical("cpu:other") as own:
            pass
        os.write(write_end, json.dumps(own.report.to_dict()).encode())

    in_a_child(enters)
    os.close(write_end)
    with open(read_end, "rb") as file:
        report: dict[str, Any] = json.loads(file.read())
    return report


def a_childs_region_after_its_parents(inside: list[int]) -> None:
    """It stays on its CPUs while the supervisor still looks for what the parent's may have borne.

    The parent's old masks name the child's thread, too, which was there in the parent's region.
    """
    own = os.sched_getaffinity(0)
    start_helper()
    read_end, write_end = os.pipe()

    def waits() -> None:
        os.read(read_end, 1)
        with region.critical(timeout=10) as timed:
            bears = bear()
            try:
                end = time.monotonic() + 0.8
                while time.monotonic() < end:
                    for process in (0, bears):
                        assert os.sched_getaffinity(process) == set(inside), "it was moved off"
            finally:
                os.kill(bears, signal.SIGKILL)
                os.waitpid(bears, 0)
        assert timed.report.verdict == "clean", timed.report.reasons
        assert not timed.report.joined
        assert os.sched_getaffinity(0) == own

    child = start_child(waits)
    with region.critical():
        assert os.sched_getaffinity(child) == set(inside)
    os.write(write_end, b"1")
    await_child(child)
    assert os.sched_getaffinity(0) == own


def has(thread: int, cpus: set[int]) -> bool:
    """Whether a thread, if there is such, has this mask."""
    try:
        return os.sched_getaffinity(thread) == cpus
    except ProcessLookupError:
        return True


def regions_among_threads_that_come_and_go(count: int) -> list[str]:
    """Whoever is there after a region has the mask of before; returns the verdicts."""
    own = os.sched_getaffinity(0)
    stop = threading.Event()

    def bear_threads() -> None:
        while not stop.is_set():
            children = [threading.Thread(target=time.sleep, args=(0.002,)) for _ in range(3)]
            for child in children:
                child.start()
            for child in children:
                child.join()

    bearers = [threading.Thread(target=bear_threads) for _ in range(4)]
    for bearer in bearers:
        bearer.start()
    verdicts = []
    for _ in range(count):
        with region.critical() as timed:
            end = time.monotonic() + 0.002
            while time.monotonic() < end:
                pass
        verdicts.append(timed.report.verdict)
        # One that was being made when masks were restored appears with the region's, for a moment.
        wait_for(lambda: all(has(int(it), own) for it in os.listdir("/proc/self/task")))
    stop.set()
    for bearer in bearers:
        bearer.join()
    return verdicts


def late_births_go_back(reserved: int) -> None:
    """What appears with the region's mask only after its end is found, too.

    A real one would have been in the middle of a fork when masks were restored; this one gets the
    mask in that moment. On a busy machine that may come too late, so there are several tries.
    """
    own = os.sched_getaffinity(0)
    start_helper()
    child = bear()
    try:
        for _ in range(4):
            with region.critical():
                pass
            os.sched_setaffinity(child, [reserved])
            deadline = time.monotonic() + 1.5
            while time.monotonic() < deadline:
                if os.sched_getaffinity(child) == own:
                    return
                time.sleep(0.005)
        raise AssertionError("it stays")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
