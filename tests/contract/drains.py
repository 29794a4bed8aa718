"""Telling when what was submitted is done: what an event on a stream stands for, and what is left
of streams, events and contexts that have ended.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cuda.bindings import driver

from contract.support import (
    CASES,
    LEGACY,
    MILLISECOND,
    NON_BLOCKING,
    PER_THREAD,
    Child,
    Gpu,
    case,
    equal,
    expect,
    name,
    ok,
    seconds,
)


@case
def events_work_while_another_context_is_current(gpu: Gpu) -> None:
    other = gpu.second()
    with other.current():
        stream, event = other.stream(), other.event()
        other.spin(stream, 100)
    ok(driver.cuEventRecord(event, stream))
    expect(driver.cuEventQuery(event), "NOT_READY")
    expect(driver.cuStreamQuery(stream), "NOT_READY")
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuEventQuery(event))
    ok(driver.cuStreamQuery(stream))


@case
def an_event_belongs_to_the_streams_of_its_context(gpu: Gpu) -> None:
    other = gpu.second()
    with other.current():
        stream = other.stream()
    event = gpu.event()
    expect(driver.cuEventRecord(event, stream), "INVALID_HANDLE")
    ok(driver.cuEventRecord(event, gpu.stream()))
    ok(driver.cuEventSynchronize(event))


@case
def streams_wait_for_events_of_other_contexts(gpu: Gpu) -> None:
    other = gpu.second()
    with other.current():
        busy = other.stream()
        other.spin(busy, 150)
        before = other.record(busy)
    stream = gpu.stream()
    ok(driver.cuStreamWaitEvent(stream, before, 0))
    event = gpu.record(stream)
    time.sleep(0.05)
    expect(driver.cuEventQuery(event), "NOT_READY")
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuEventQuery(before))


def own_pool(gpu: Gpu) -> Any:
    properties = driver.CUmemPoolProps()
    properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.handleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = gpu.device
    return ok(driver.cuMemPoolCreate(properties))


@case
def pools_do_not_hold_up_the_thread(gpu: Gpu) -> None:
    """Nor does an event behind their memory come before the work that uses it."""
    assert gpu.context
    for pool in (ok(driver.cuDeviceGetDefaultMemPool(gpu.device)), own_pool(gpu)):
        first, second, words = gpu.stream(), gpu.stream(), gpu.pinned(1)

        def use(stream: Any, pool: Any = pool, words: Any = words) -> None:
            place = int(ok(driver.cuMemAllocFromPoolAsync(1 << 20, pool, stream)))
            ok(driver.cuMemsetD32Async(place, 5, 1, stream))
            gpu.launch("add_one", stream, place, 1)
            ok(driver.cuMemcpyDtoHAsync(ctypes.addressof(words), place, 4, stream))
            ok(driver.cuMemFreeAsync(place, stream))

        use(first)
        ok(driver.cuStreamSynchronize(first))
        words[0] = -1
        gpu.spin(first, 150)
        took = seconds(partial(use, first))
        assert took < 0.1, took
        event = gpu.record(first)
        expect(driver.cuEventQuery(event), "NOT_READY")
        equal(words[0], -1)
        ok(driver.cuEventSynchronize(event))
        equal(words[0], 6)
        # Memory that another stream has freed may be had only behind that.
        gpu.spin(first, 50)
        use(first)
        use(second)
        events = [gpu.record(it) for it in (first, second)]
        for event in events:
            ok(driver.cuEventSynchronize(event))
        ok(driver.cuStreamQuery(second))
        equal(words[0], 6)
        ok(driver.cuMemPoolTrimTo(pool, 0))


@case
def an_event_waits_for_the_value_that_its_stream_waits_for(gpu: Gpu) -> None:
    at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    for wait in (driver.cuStreamWaitValue32, driver.cuStreamWaitValue64):
        waiting, other, place = gpu.stream(), gpu.stream(), gpu.integers(2)
        words = gpu.pinned(2)
        ok(wait(waiting, ctypes.addressof(words), 1, at_least))
        gpu.launch("add_one", waiting, place, 1)
        event = gpu.record(waiting)
        gpu.launch("add_one", other, place + 4, 1)
        ok(driver.cuEventSynchronize(gpu.record(other)))
        time.sleep(0.05)
        expect(driver.cuEventQuery(event), "NOT_READY")
        expect(driver.cuStreamQuery(waiting), "NOT_READY")
        # The high half last: until then the value of both is negative.
        words[0] = 1
        words[1] = 0
        ok(driver.cuEventSynchronize(event))
        equal(gpu.read(place, 2), [1, 1])


@case
def streams_of_all_priorities_have_events(gpu: Gpu) -> None:
    assert gpu.context
    create = driver.cuStreamCreateWithPriority
    least, greatest = ok(driver.cuCtxGetStreamPriorityRange())
    # Others than these are taken for the nearest.
    equal(ok(driver.cuStreamGetPriority(ok(create(NON_BLOCKING, greatest - 5)))), greatest)
    equal(ok(driver.cuStreamGetPriority(ok(create(NON_BLOCKING, least + 5)))), least)
    streams = [ok(create(NON_BLOCKING, it)) for it in range(greatest, least + 1)]
    for stream in streams:
        gpu.spin(stream, 100)
    events = [gpu.record(it) for it in streams]
    for event in events:
        expect(driver.cuEventQuery(event), "NOT_READY")
    for event in reversed(events):
        ok(driver.cuEventSynchronize(event))
    for stream in streams:
        ok(driver.cuStreamQuery(stream))


@case
def the_legacy_stream_waits_for_all_priorities(gpu: Gpu) -> None:
    assert gpu.context
    for priority in ok(driver.cuCtxGetStreamPriorityRange()):
        gpu.spin(ok(driver.cuStreamCreateWithPriority(0, priority)), 150)
        event = gpu.record(LEGACY)
        time.sleep(0.05)
        expect(driver.cuEventQuery(event), "NOT_READY")
        ok(driver.cuEventSynchronize(event))


@case
def the_legacy_stream_waits_for_other_threads_default_streams(gpu: Gpu) -> None:
    assert gpu.context
    busy, over = threading.Event(), threading.Event()

    def work() -> None:
        ok(driver.cuCtxSetCurrent(gpu.context))
        gpu.spin(PER_THREAD, 200)
        busy.set()
        over.wait()

    thread = threading.Thread(target=work)
    thread.start()
    busy.wait()
    # One's own is another one.
    ok(driver.cuStreamQuery(PER_THREAD))
    event = gpu.record(LEGACY)
    time.sleep(0.05)
    expect(driver.cuEventQuery(event), "NOT_READY")
    ok(driver.cuEventSynchronize(event))
    over.set()
    thread.join()


@case
def a_threads_default_stream_finishes_its_work(gpu: Gpu) -> None:
    place = gpu.integers(1)
    gpu.thread(lambda: gpu.launch("slow_add", PER_THREAD, place, 1, 150 * MILLISECOND))
    ok(driver.cuEventSynchronize(gpu.record(LEGACY)))
    equal(gpu.read(place, 1), [1])


@case
def an_event_outlives_its_stream(gpu: Gpu) -> None:
    for flags in (0, NON_BLOCKING):
        stream, place = gpu.stream(flags), gpu.integers(1)
        gpu.launch("slow_add", stream, place, 1, 100 * MILLISECOND)
        event = gpu.record(stream)
        ok(driver.cuStreamDestroy(stream))
        expect(driver.cuEventQuery(event), "NOT_READY")
        ok(driver.cuEventSynchronize(event))
        equal(gpu.read(place, 1), [1])


@case
def the_legacy_stream_waits_for_destroyed_ones(gpu: Gpu) -> None:
    stream, place, words = gpu.stream(0), gpu.integers(1), gpu.pinned(1)
    gpu.launch("slow_add", stream, place, 1, 100 * MILLISECOND)
    ok(driver.cuStreamDestroy(stream))
    ok(driver.cuMemcpyDtoHAsync(ctypes.addressof(words), place, 4, LEGACY))
    ok(driver.cuEventSynchronize(gpu.record(LEGACY)))
    equal(words[0], 1)


@case
def nothing_runs_after_its_context(gpu: Gpu) -> None:
    """Whether destroying a context waits for its work or drops it is left open."""
    words = gpu.pinned(1)
    words[0] = 0
    other = gpu.second()
    with other.current():
        other.launch("slow_add", other.stream(), ctypes.addressof(words), 1, 200 * MILLISECOND)
    ok(driver.cuCtxDestroy(other.context))
    then = words[0]
    time.sleep(0.4)
    equal(words[0], then)
    # The other context has not suffered.
    ok(driver.cuEventSynchronize(gpu.record(gpu.stream())))


@case
def asking_for_an_event_ends_with_its_context(gpu: Gpu) -> None:
    other = gpu.second()
    with other.current():
        stream = other.stream()
        other.spin(stream, 200)
        event = other.record(stream)
    outcome: list[str] = []
    asked = threading.Event()

    def ask() -> None:
        ok(driver.cuCtxSetCurrent(gpu.context))
        while (found := name(driver.cuEventQuery(event))) == "NOT_READY":
            asked.set()
        outcome.append(found)

    thread = threading.Thread(target=ask)
    thread.start()
    asked.wait()
    ok(driver.cuCtxDestroy(other.context))
    thread.join(20)
    assert outcome, "it still asks"
    # It may have seen the end of the work.
    assert outcome[0] in {"SUCCESS", "CONTEXT_IS_DESTROYED"}, outcome


class Remains:
    """Handles of things that have ended, with work that was not done; and some that live."""

    def __init__(self, gpu: Gpu, ending: str) -> None:
        owner = gpu if ending == "a reset" else gpu.second()
        with owner.current():
            self.stream, self.event = owner.stream(), owner.event()
            owner.spin(self.stream, 50)
            ok(driver.cuEventRecord(self.event, self.stream))
        self.context = owner.context
        if ending == "a context's end":
            ok(driver.cuCtxDestroy(self.context))
        else:
            device = gpu.initialise()
            ok(driver.cuDevicePrimaryCtxReset(device))
            ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
        self.live_stream = ok(driver.cuStreamCreate(NON_BLOCKING))
        self.live_event = ok(driver.cuEventCreate(0))


# The status after a context's end; after a reset it is CONTEXT_IS_DESTROYED for all of them.
REMAINS: dict[str, tuple[str, Callable[[Remains], Any]]] = {
    "cuEventQuery": ("CONTEXT_IS_DESTROYED", lambda it: driver.cuEventQuery(it.event)),
    "cuEventSynchronize": ("CONTEXT_IS_DESTROYED", lambda it: driver.cuEventSynchronize(it.event)),
    "cuEventDestroy": ("CONTEXT_IS_DESTROYED", lambda it: driver.cuEventDestroy(it.event)),
    "cuEventRecord": ("INVALID_CONTEXT", lambda it: driver.cuEventRecord(it.event, it.stream)),
    "cuEventRecord, live stream": (
        "CONTEXT_IS_DESTROYED",
        lambda it: driver.cuEventRecord(it.event, it.live_stream),
    ),
    "cuEventRecord, live event": (
        "INVALID_CONTEXT",
        lambda it: driver.cuEventRecord(it.live_event, it.stream),
    ),
    "cuStreamQuery": ("INVALID_CONTEXT", lambda it: driver.cuStreamQuery(it.stream)),
    "cuStreamSynchronize": ("INVALID_CONTEXT", lambda it: driver.cuStreamSynchronize(it.stream)),
    "cuStreamIsCapturing": ("INVALID_CONTEXT", lambda it: driver.cuStreamIsCapturing(it.stream)),
    "cuStreamWaitEvent": (
        "CONTEXT_IS_DESTROYED",
        lambda it: driver.cuStreamWaitEvent(it.live_stream, it.event, 0),
    ),
    "cuStreamDestroy": ("INVALID_CONTEXT", lambda it: driver.cuStreamDestroy(it.stream)),
}


def after_an_end(gpu: Gpu, ending: str, call: str) -> None:
    """The header promises nothing; each call is a case of its own, since it may crash."""
    remains = Remains(gpu, ending)
    status, function = REMAINS[call]
    wanted = status if ending == "a context's end" else "CONTEXT_IS_DESTROYED"
    equal(name(function(remains)), wanted)
    ok(driver.cuEventRecord(remains.live_event, remains.live_stream))
    ok(driver.cuEventSynchronize(remains.live_event))


for _ending in ("a context's end", "a reset"):
    for _call in REMAINS:
        CASES[f"after {_ending}: {_call}"] = partial(after_an_end, ending=_ending, call=_call)


@case
def a_context_that_has_ended_can_be_made_current(gpu: Gpu) -> None:
    """And nothing can be done in it."""
    ok(driver.cuCtxSetCurrent(Remains(gpu, "a context's end").context))
    expect(driver.cuEventCreate(0), "CONTEXT_IS_DESTROYED")
    expect(driver.cuCtxSynchronize(), "CONTEXT_IS_DESTROYED")


def after_a_streams_end(gpu: Gpu, call: str) -> None:
    """Nobody may touch a destroyed stream: the driver reads through its handle, and crashes."""

    def touch(_child: Child) -> None:
        faulthandler.disable()  # It would tell of a failure.
        stream, event = gpu.stream(), gpu.event()
        gpu.spin(stream, 50)
        ok(driver.cuStreamDestroy(stream))
        if call == "cuStreamQuery":
            driver.cuStreamQuery(stream)
        else:
            driver.cuEventRecord(event, stream)

    child = Child(touch)
    _, status = os.waitpid(child.pid, 0)
    equal(os.waitstatus_to_exitcode(status), -signal.SIGSEGV)


for _call in ("cuStreamQuery", "cuEventRecord"):
    CASES[f"after a stream's end: {_call}"] = partial(after_a_streams_end, call=_call)
