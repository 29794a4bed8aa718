"""Events: order and time."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from contract.support import MILLISECOND, NO_TIMING, Gpu, case, equal, expect, ok


@case
def events_measure_time(gpu: Gpu) -> None:
    stream = gpu.stream()
    start = gpu.record(stream)
    gpu.spin(stream, 20)
    end = gpu.record(stream)
    expect(driver.cuEventElapsedTime(start, end), "NOT_READY")
    expect(driver.cuEventQuery(end), "NOT_READY")
    ok(driver.cuEventSynchronize(end))
    ok(driver.cuEventQuery(end))
    took = ok(driver.cuEventElapsedTime(start, end))
    assert 19.5 < took < 40, took
    back = ok(driver.cuEventElapsedTime(end, start))
    assert -40 < back < -19.5, back


@case
def events_without_time_or_recording_measure_nothing(gpu: Gpu) -> None:
    stream = gpu.stream()
    start, never, timeless = gpu.record(stream), gpu.event(), gpu.event(NO_TIMING)
    ok(driver.cuEventQuery(never))
    ok(driver.cuEventSynchronize(never))
    ok(driver.cuEventRecord(timeless, stream))
    ok(driver.cuStreamSynchronize(stream))
    expect(driver.cuEventElapsedTime(start, never), "INVALID_HANDLE")
    expect(driver.cuEventElapsedTime(start, timeless), "INVALID_HANDLE")


@case
def an_event_stands_for_its_last_recording(gpu: Gpu) -> None:
    stream = gpu.stream()
    event = gpu.record(stream)
    ok(driver.cuEventSynchronize(event))
    gpu.spin(stream, 100)
    ok(driver.cuEventRecord(event, stream))
    expect(driver.cuEventQuery(event), "NOT_READY")
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuStreamQuery(stream))


@case
def streams_wait_for_events(gpu: Gpu) -> None:
    first, second, place = gpu.stream(), gpu.stream(), gpu.integers(1)
    gpu.launch("slow_add", first, place, 1, 50 * MILLISECOND)
    event = gpu.record(first)
    ok(driver.cuStreamWaitEvent(second, event, 0))
    pinned = int(ok(driver.cuMemHostAlloc(4, 0)))
    ok(driver.cuMemcpyDtoHAsync(pinned, place, 4, second))
    # What it waits for is settled when it is called.
    gpu.spin(first, 200)
    ok(driver.cuEventRecord(event, first))
    ok(driver.cuStreamSynchronize(second))
    expect(driver.cuStreamQuery(first), "NOT_READY")
    equal(ctypes.c_int32.from_address(pinned).value, 1)
    ok(driver.cuCtxSynchronize())


@case
def an_event_of_the_context_stands_for_all_streams(gpu: Gpu) -> None:
    stream = gpu.stream()
    gpu.spin(stream, 100)
    event = gpu.event(NO_TIMING)
    ok(driver.cuCtxRecordEvent(gpu.context, event))
    expect(driver.cuEventQuery(event), "NOT_READY")
    ok(driver.cuEventSynchronize(event))
    ok(driver.cuStreamQuery(stream))
