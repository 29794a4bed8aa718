"""Captures and graphs."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver

from contract.support import (
    LEGACY,
    MILLISECOND,
    MODES,
    NO_TIMING,
    PER_THREAD,
    Gpu,
    case,
    equal,
    expect,
    in_thread,
    name,
    ok,
)


@contextmanager
def captured(stream: Any, mode: str = "global") -> Iterator[list[Any]]:
    """Capture a stream; the graph is in the list afterwards."""
    graphs: list[Any] = []
    ok(driver.cuStreamBeginCapture(stream, MODES[mode]))
    yield graphs
    graphs.append(ok(driver.cuStreamEndCapture(stream)))


def status(stream: Any) -> str:
    found = ok(driver.cuStreamIsCapturing(stream))
    return str(found.name).removeprefix("CU_STREAM_CAPTURE_STATUS_")


@case
def a_capture_runs_when_its_graph_is_launched(gpu: Gpu) -> None:
    for mode in MODES:
        stream, place = gpu.stream(), gpu.integers(4)
        with captured(stream, mode) as graphs:
            equal(status(stream), "ACTIVE")
            gpu.launch("add_one", stream, place, 4)
            ok(driver.cuMemsetD32Async(place, 7, 1, stream))
            gpu.launch("add_one", stream, place, 2)
        equal(status(stream), "NONE")
        equal(gpu.read(place, 4), [0] * 4)
        executable = ok(driver.cuGraphInstantiate(graphs[0], 0))
        equal(gpu.read(place, 4), [0] * 4)
        ok(driver.cuGraphUpload(executable, stream))
        for _ in range(2):
            ok(driver.cuGraphLaunch(executable, stream))
        ok(driver.cuStreamSynchronize(stream))
        equal(gpu.read(place, 4), [8, 4, 2, 2])
        ok(driver.cuGraphExecDestroy(executable))
        ok(driver.cuGraphDestroy(graphs[0]))


@case
def a_capture_can_add_to_a_graph(gpu: Gpu) -> None:
    stream, place = gpu.stream(), gpu.integers(1)
    graph = ok(driver.cuGraphCreate(0))
    for count in (1, 2):
        begin = driver.cuStreamBeginCaptureToGraph
        ok(begin(stream, graph, None, None, 0, MODES["relaxed"]))
        gpu.launch("add_one", stream, place, 1)
        equal(int(ok(driver.cuStreamEndCapture(stream))), int(graph))
        equal(ok(driver.cuGraphGetNodes(graph, 0))[1], count)
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuStreamSynchronize(stream))


@case
def a_graph_takes_its_time(gpu: Gpu) -> None:
    stream = gpu.stream()
    with captured(stream) as graphs:
        for _ in range(4):
            gpu.spin(stream, 5)
    equal(ok(driver.cuGraphGetNodes(graphs[0], 0))[1], 4)
    executable = ok(driver.cuGraphInstantiate(graphs[0], 0))
    start = gpu.record(stream)
    ok(driver.cuGraphLaunch(executable, stream))
    end = gpu.record(stream)
    ok(driver.cuEventSynchronize(end))
    took = ok(driver.cuEventElapsedTime(start, end))
    assert 19.5 < took < 60, took


@case
def captures_fork_and_join(gpu: Gpu) -> None:
    first, second, place = gpu.stream(), gpu.stream(), gpu.integers(2)
    fork, join = gpu.event(NO_TIMING), gpu.event(NO_TIMING)
    with captured(first) as graphs:
        gpu.launch("add_one", first, place, 1)
        ok(driver.cuEventRecord(fork, first))
        ok(driver.cuStreamWaitEvent(second, fork, 0))
        equal(status(second), "ACTIVE")
        gpu.launch("add_one", second, place + 4, 1)
        ok(driver.cuEventRecord(join, second))
        ok(driver.cuStreamWaitEvent(first, join, 0))
    equal(status(second), "NONE")
    executable = ok(driver.cuGraphInstantiate(graphs[0], 0))
    ok(driver.cuGraphLaunch(executable, first))
    ok(driver.cuStreamSynchronize(first))
    equal(gpu.read(place, 2), [1, 1])


def end_capture(stream: Any) -> str:
    return name(driver.cuStreamEndCapture(stream))


@case
def a_capture_must_be_joined(gpu: Gpu) -> None:
    first, second, place = gpu.stream(), gpu.stream(), gpu.integers(1)
    fork = gpu.event(NO_TIMING)
    ok(driver.cuStreamBeginCapture(first, MODES["global"]))
    ok(driver.cuEventRecord(fork, first))
    ok(driver.cuStreamWaitEvent(second, fork, 0))
    gpu.launch("add_one", second, place, 1)
    equal(end_capture(first), "STREAM_CAPTURE_UNJOINED")
    equal((status(first), status(second)), ("NONE", "NONE"))


@case
def captures_begin_and_end_in_their_place(gpu: Gpu) -> None:
    stream, other = gpu.stream(), gpu.stream()
    begin = driver.cuStreamBeginCapture
    expect(begin(LEGACY, MODES["relaxed"]), "STREAM_CAPTURE_UNSUPPORTED")
    equal(end_capture(stream), "ILLEGAL_STATE")
    ok(begin(stream, MODES["global"]))
    expect(begin(stream, MODES["global"]), "ILLEGAL_STATE")
    equal(end_capture(stream), "SUCCESS")
    ok(begin(stream, MODES["relaxed"]))
    equal(gpu.thread(lambda: end_capture(stream)), "SUCCESS")
    ok(begin(PER_THREAD, MODES["global"]))
    equal(end_capture(PER_THREAD), "SUCCESS")
    equal(status(other), "NONE")


@case
def another_thread_ends_a_capture_and_gets_no_graph(gpu: Gpu) -> None:
    stream = gpu.stream()
    for mode in ("global", "thread_local"):
        ok(driver.cuStreamBeginCapture(stream, MODES[mode]))
        equal(gpu.thread(lambda: end_capture(stream)), "STREAM_CAPTURE_WRONG_THREAD")
        equal(end_capture(stream), "ILLEGAL_STATE")
        equal(status(stream), "NONE")


@case
def a_graph_has_its_place_in_the_stream(gpu: Gpu) -> None:
    stream, place, words = gpu.stream(), gpu.integers(1), gpu.pinned(1)
    with captured(stream) as graphs:
        gpu.launch("slow_add", stream, place, 1, 30 * MILLISECOND)
    executable = ok(driver.cuGraphInstantiate(graphs[0], 0))
    ok(driver.cuMemsetD32Async(place, 10, 1, stream))
    ok(driver.cuGraphLaunch(executable, stream))
    ok(driver.cuMemcpyDtoHAsync(ctypes.addressof(words), place, 4, stream))
    ok(driver.cuGraphLaunch(executable, stream))
    event = gpu.record(stream)
    # A launched graph needs its executable no more.
    ok(driver.cuGraphExecDestroy(executable))
    expect(driver.cuEventQuery(event), "NOT_READY")
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuStreamQuery(stream))
    equal((words[0], gpu.read(place, 1)), (11, [12]))


@case
def launches_of_one_graph_follow_each_other(gpu: Gpu) -> None:
    first, second = gpu.stream(), gpu.stream()
    with captured(first) as graphs:
        gpu.spin(first, 100)
    executable = ok(driver.cuGraphInstantiate(graphs[0], 0))
    start = gpu.record(first)
    ends = []
    for stream in (first, second):
        ok(driver.cuGraphLaunch(executable, stream))
        ends.append(gpu.record(stream))
    ok(driver.cuEventSynchronize(ends[1]))
    ok(driver.cuEventQuery(ends[0]))
    took = ok(driver.cuEventElapsedTime(start, ends[1]))
    assert 199 < took < 400, took


@case
def an_event_behind_a_graph_stands_for_all_its_branches(gpu: Gpu) -> None:
    first, second = gpu.stream(), gpu.stream()
    fork, join = gpu.event(NO_TIMING), gpu.event(NO_TIMING)
    with captured(first) as graphs:
        ok(driver.cuEventRecord(fork, first))
        ok(driver.cuStreamWaitEvent(second, fork, 0))
        gpu.spin(second, 100)
        ok(driver.cuEventRecord(join, second))
        gpu.spin(first, 1)
        ok(driver.cuStreamWaitEvent(first, join, 0))
    executable = ok(driver.cuGraphInstantiate(graphs[0], 0))
    ok(driver.cuGraphLaunch(executable, first))
    event = gpu.record(first)
    # The stream whose work was captured has none.
    ok(driver.cuStreamQuery(second))
    time.sleep(0.05)
    expect(driver.cuEventQuery(event), "NOT_READY")
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuStreamQuery(first))


@case
def the_legacy_stream_may_not_wait_for_a_capture(gpu: Gpu) -> None:
    blocking, place = gpu.stream(0), gpu.integers(1)
    ok(driver.cuStreamBeginCapture(blocking, MODES["relaxed"]))
    gpu.launch("add_one", blocking, place, 1)
    expect(gpu.try_launch("add_one", None, place, 1), "STREAM_CAPTURE_IMPLICIT")
    equal(status(blocking), "INVALIDATED")
    equal(end_capture(blocking), "STREAM_CAPTURE_INVALIDATED")
    free = gpu.stream()
    ok(driver.cuStreamBeginCapture(free, MODES["relaxed"]))
    gpu.launch("add_one", None, place, 1)
    equal(end_capture(free), "SUCCESS")


@case
def captures_stay_among_themselves(gpu: Gpu) -> None:
    first, second = gpu.stream(), gpu.stream()
    outside = gpu.record(second)
    ok(driver.cuStreamBeginCapture(first, MODES["global"]))
    expect(driver.cuStreamWaitEvent(first, outside, 0), "STREAM_CAPTURE_ISOLATION")
    equal(end_capture(first), "STREAM_CAPTURE_INVALIDATED")
    inside = gpu.event(NO_TIMING)
    ok(driver.cuStreamBeginCapture(first, MODES["global"]))
    ok(driver.cuStreamBeginCapture(second, MODES["global"]))
    ok(driver.cuEventRecord(inside, first))
    expect(driver.cuStreamWaitEvent(second, inside, 0), "STREAM_CAPTURE_MERGE")
    equal(
        (end_capture(first), end_capture(second)),
        ("STREAM_CAPTURE_INVALIDATED", "STREAM_CAPTURE_INVALIDATED"),
    )


@case
def a_captured_event_cannot_be_asked(gpu: Gpu) -> None:
    stream = gpu.stream()
    event = gpu.event(NO_TIMING)
    ok(driver.cuStreamBeginCapture(stream, MODES["relaxed"]))
    ok(driver.cuEventRecord(event, stream))
    expect(driver.cuEventQuery(event), "CAPTURED_EVENT")
    equal(end_capture(stream), "STREAM_CAPTURE_INVALIDATED")


@case
def the_capture_mode_is_each_threads_own(gpu: Gpu) -> None:
    assert gpu.context
    exchange = driver.cuThreadExchangeStreamCaptureMode
    equal(ok(exchange(MODES["relaxed"])), MODES["global"])
    equal(in_thread(lambda: ok(exchange(MODES["global"]))), MODES["global"])
    equal(ok(exchange(MODES["thread_local"])), MODES["relaxed"])
