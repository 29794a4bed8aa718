"""Streams: order, default streams, what waits for what."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from cuda.bindings import driver

from contract.support import (
    LEGACY,
    MILLISECOND,
    NO_TIMING,
    NON_BLOCKING,
    PER_THREAD,
    Gpu,
    case,
    equal,
    expect,
    in_thread,
    name,
    ok,
    seconds,
)


@case
def launching_does_not_wait(gpu: Gpu) -> None:
    stream = gpu.stream()
    took = seconds(lambda: gpu.spin(stream, 200))
    assert took < 0.1, took
    expect(driver.cuStreamQuery(stream), "NOT_READY")
    took = seconds(lambda: ok(driver.cuStreamSynchronize(stream)))
    assert 0.1 < took < 0.6, took
    ok(driver.cuStreamQuery(stream))


@case
def a_stream_keeps_its_order(gpu: Gpu) -> None:
    stream, place = gpu.stream(), gpu.integers(8)
    words = gpu.pinned(8)
    pinned = ctypes.addressof(words)
    for count in (8, 4, 1):
        gpu.launch("slow_add", stream, place, count, 2 * MILLISECOND)
    ok(driver.cuMemcpyDtoHAsync(pinned, place, 32, stream))
    ok(driver.cuMemsetD32Async(place, 0, 8, stream))
    ok(driver.cuStreamSynchronize(stream))
    equal(list(words), [3, 2, 2, 2, 1, 1, 1, 1])
    equal(gpu.read(place, 8), [0] * 8)


@case
def streams_run_side_by_side(gpu: Gpu) -> None:
    streams = [gpu.stream() for _ in range(2)]

    def both() -> None:
        for stream in streams:
            gpu.spin(stream, 150)
        for stream in streams:
            ok(driver.cuStreamSynchronize(stream))

    took = seconds(both)
    assert 0.14 < took < 0.28, took


@case
def the_context_waits_for_all_streams(gpu: Gpu) -> None:
    for stream in (gpu.stream(), gpu.stream(0), None):
        gpu.spin(stream, 60)
        took = seconds(lambda: ok(driver.cuCtxSynchronize()))
        assert took > 0.04, took


@case
def synchronous_copies_wait(gpu: Gpu) -> None:
    place = gpu.integers(1)
    gpu.launch("slow_add", None, place, 1, 50 * MILLISECOND)
    equal(gpu.read(place, 1), [1])
    blocking = gpu.stream(0)
    gpu.launch("slow_add", blocking, place, 1, 50 * MILLISECOND)
    equal(gpu.read(place, 1), [2])


def is_held_up(gpu: Gpu, busy: Any, other: Any) -> bool:
    """Whether work in `other` waits for earlier work in `busy`."""
    gpu.spin(busy, 150)
    event = gpu.record(other)
    time.sleep(0.05)
    waits = name(driver.cuEventQuery(event)) == "NOT_READY"
    ok(driver.cuCtxSynchronize())
    return waits


@case
def the_legacy_stream_waits_for_blocking_streams(gpu: Gpu) -> None:
    blocking, free = gpu.stream(0), gpu.stream()
    equal(is_held_up(gpu, blocking, None), True)
    equal(is_held_up(gpu, None, blocking), True)
    equal(is_held_up(gpu, free, None), False)
    equal(is_held_up(gpu, None, free), False)
    equal(is_held_up(gpu, blocking, LEGACY), True)
    equal(is_held_up(gpu, blocking, gpu.stream(0)), False)


@case
def each_thread_has_a_default_stream(gpu: Gpu) -> None:
    equal(is_held_up(gpu, PER_THREAD, None), True)
    equal(is_held_up(gpu, None, PER_THREAD), True)
    gpu.spin(PER_THREAD, 150)

    def other() -> str:
        event = gpu.record(PER_THREAD)
        time.sleep(0.05)
        return name(driver.cuEventQuery(event))

    equal(gpu.thread(other), "SUCCESS")
    expect(driver.cuStreamQuery(PER_THREAD), "NOT_READY")
    ok(driver.cuStreamSynchronize(PER_THREAD))


@case
def synchronising_the_legacy_stream_waits_for_blocking_ones(gpu: Gpu) -> None:
    gpu.spin(gpu.stream(0), 100)
    took = seconds(lambda: ok(driver.cuStreamSynchronize(LEGACY)))
    assert took > 0.06, took
    gpu.spin(gpu.stream(), 150)
    took = seconds(lambda: ok(driver.cuStreamSynchronize(LEGACY)))
    assert took < 0.1, took


@case
def querying_the_legacy_stream_tells_of_blocking_ones(gpu: Gpu) -> None:
    gpu.spin(gpu.stream(0), 100)
    expect(driver.cuStreamQuery(LEGACY), "NOT_READY")
    ok(driver.cuCtxSynchronize())
    ok(driver.cuStreamQuery(LEGACY))


@case
def a_destroyed_stream_finishes_its_work(gpu: Gpu) -> None:
    stream, place = gpu.stream(), gpu.integers(1)
    gpu.launch("slow_add", stream, place, 1, 100 * MILLISECOND)
    took = seconds(lambda: ok(driver.cuStreamDestroy(stream)))
    assert took < 0.08, took
    ok(driver.cuCtxSynchronize())
    equal(gpu.read(place, 1), [1])


@case
def streams_wait_for_values(gpu: Gpu) -> None:
    waiting, writing, place = gpu.stream(), gpu.stream(), gpu.integers(2)
    at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    ok(driver.cuStreamWaitValue32(waiting, place, 3, at_least))
    gpu.launch("add_one", waiting, place + 4, 1)
    ok(driver.cuStreamWriteValue32(writing, place, 2, 0))
    ok(driver.cuStreamSynchronize(writing))
    time.sleep(0.05)
    expect(driver.cuStreamQuery(waiting), "NOT_READY")
    ok(driver.cuStreamWriteValue32(writing, place, 4, 0))
    ok(driver.cuStreamSynchronize(waiting))
    equal(gpu.read(place, 2), [4, 1])


@case
def a_stream_can_be_drained_without_a_current_context(gpu: Gpu) -> None:
    stream, event, done = gpu.stream(), gpu.event(NO_TIMING), gpu.record(None)
    ok(driver.cuEventSynchronize(done))

    def drain() -> dict[str, str]:
        return {
            "cuEventRecord": name(driver.cuEventRecord(event, stream)),
            "cuEventSynchronize": name(driver.cuEventSynchronize(event)),
            "cuEventQuery": name(driver.cuEventQuery(done)),
            "cuStreamSynchronize": name(driver.cuStreamSynchronize(stream)),
            "cuStreamQuery": name(driver.cuStreamQuery(stream)),
            "cuStreamGetCtx": name(driver.cuStreamGetCtx(stream)),
            "cuStreamIsCapturing": name(driver.cuStreamIsCapturing(stream)),
        }

    outcomes = in_thread(drain)
    equal(outcomes, dict.fromkeys(outcomes, "SUCCESS"))


@case
def the_default_stream_needs_a_current_context(gpu: Gpu) -> None:
    assert gpu.context
    for stream in (driver.CUstream(0), LEGACY, PER_THREAD):
        equal(in_thread(lambda it=stream: name(driver.cuStreamSynchronize(it))), "INVALID_CONTEXT")


@case
def streams_tell_what_they_are(gpu: Gpu) -> None:
    assert gpu.context
    least, greatest = ok(driver.cuCtxGetStreamPriorityRange())
    assert greatest <= least
    stream = ok(driver.cuStreamCreateWithPriority(NON_BLOCKING, greatest))
    equal(ok(driver.cuStreamGetPriority(stream)), greatest)
    equal(ok(driver.cuStreamGetFlags(stream)), NON_BLOCKING)
    expect(driver.cuStreamCreate(8), "INVALID_VALUE")


@case
def host_functions_run_in_order_on_another_thread(gpu: Gpu) -> None:
    stream, place = gpu.stream(), gpu.integers(1)
    pinned = int(ok(driver.cuMemHostAlloc(4, 0)))
    word = ctypes.c_int32.from_address(pinned)
    seen: list[tuple[int, bool]] = []
    here = threading.get_native_id()

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def look(data: int | None) -> None:
        time.sleep(0.02)
        seen.append((word.value, threading.get_native_id() != here))

    function = driver.CUhostFn(_ptr=ctypes.addressof(look))
    gpu.launch("slow_add", stream, place, 1, 20 * MILLISECOND)
    ok(driver.cuMemcpyDtoHAsync(pinned, place, 4, stream))
    ok(driver.cuLaunchHostFunc(stream, function, 0))
    gpu.launch("add_one", stream, place, 1)
    ok(driver.cuMemcpyDtoHAsync(pinned, place, 4, stream))
    ok(driver.cuStreamSynchronize(stream))
    equal((seen, word.value), ([(1, True)], 2))
