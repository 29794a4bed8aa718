"""Memory, and what copies do to whom."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from contract.support import MILLISECOND, Gpu, case, equal, expect, ok, seconds


@case
def memory_holds_what_is_written(gpu: Gpu) -> None:
    assert gpu.context
    place = int(ok(driver.cuMemAlloc(64)))
    ok(driver.cuMemcpyHtoD(place, bytes(range(64)), 64))
    ok(driver.cuMemsetD8(place, 0xFF, 2))
    ok(driver.cuMemcpyDtoD(place + 32, place, 4))
    out = bytearray(64)
    ok(driver.cuMemcpyDtoH(out, place, 64))
    equal(out[:4], b"\xff\xff\x02\x03")
    equal(out[32:37], b"\xff\xff\x02\x03\x24")
    ok(driver.cuMemFree(place))
    ok(driver.cuMemFree(0))


@case
def bad_memory_is_refused(gpu: Gpu) -> None:
    assert gpu.context
    place = int(ok(driver.cuMemAlloc(64)))
    expect(driver.cuMemAlloc(0), "INVALID_VALUE")
    expect(driver.cuMemAlloc(1 << 50), "OUT_OF_MEMORY")
    expect(driver.cuMemFree(place + 4), "INVALID_VALUE")
    expect(driver.cuMemcpyHtoD(0x1000, b"1234", 4), "INVALID_VALUE")
    ok(driver.cuMemFree(place))
    expect(driver.cuMemFree(place), "INVALID_VALUE")
    ok(driver.cuMemAlloc(64))


@case
def allocating_takes_free_memory(gpu: Gpu) -> None:
    assert gpu.context
    before, total = ok(driver.cuMemGetInfo())
    assert before <= total
    size = 256 << 20
    place = ok(driver.cuMemAlloc(size))
    assert ok(driver.cuMemGetInfo())[0] <= before - size + (8 << 20)
    ok(driver.cuMemFree(place))
    assert ok(driver.cuMemGetInfo())[0] > before - size


@case
def addresses_tell_what_they_are(gpu: Gpu) -> None:
    context = gpu.context
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    owner = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_CONTEXT
    ordinal = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    place = int(ok(driver.cuMemAlloc(64)))
    equal(int(ok(driver.cuPointerGetAttribute(kind, place + 8))), 2)
    equal(int(ok(driver.cuPointerGetAttribute(owner, place))), int(context))
    equal(int(ok(driver.cuPointerGetAttribute(ordinal, place))), 0)
    pinned = int(ok(driver.cuMemHostAlloc(64, 0)))
    equal(int(ok(driver.cuPointerGetAttribute(kind, pinned))), 1)
    pageable = ctypes.create_string_buffer(64)
    address = ctypes.addressof(pageable)
    expect(driver.cuPointerGetAttribute(kind, address), "INVALID_VALUE")
    base, size = ok(driver.cuMemGetAddressRange(place + 8))
    equal((int(base), int(size)), (place, 64))
    ok(driver.cuMemFreeHost(pinned))


@case
def pageable_memory_is_the_callers_again_when_a_copy_returns(gpu: Gpu) -> None:
    stream, count = gpu.stream(), 4
    place = gpu.integers(count)
    source = (ctypes.c_int32 * count)(1, 2, 3, 4)
    gpu.spin(stream, 50)
    ok(driver.cuMemcpyHtoDAsync(place, ctypes.addressof(source), 4 * count, stream))
    ctypes.memset(source, 0, 4 * count)
    ok(driver.cuStreamSynchronize(stream))
    equal(gpu.read(place, count), [1, 2, 3, 4])


@case
def pinned_memory_is_copied_later(gpu: Gpu) -> None:
    stream, place = gpu.stream(), gpu.integers(1)
    pinned = int(ok(driver.cuMemHostAlloc(4, 0)))
    word = ctypes.c_int32.from_address(pinned)
    word.value = -1
    gpu.launch("slow_add", stream, place, 1, 100 * MILLISECOND)
    took = seconds(lambda: ok(driver.cuMemcpyDtoHAsync(pinned, place, 4, stream)))
    assert took < 0.08, took
    equal(word.value, -1)
    ok(driver.cuStreamSynchronize(stream))
    equal(word.value, 1)


@case
def memory_can_be_allocated_in_stream_order(gpu: Gpu) -> None:
    stream = gpu.stream()
    place = int(ok(driver.cuMemAllocAsync(16, stream)))
    ok(driver.cuMemsetD32Async(place, 5, 4, stream))
    gpu.launch("add_one", stream, place, 4)
    pinned = int(ok(driver.cuMemHostAlloc(16, 0)))
    ok(driver.cuMemcpyDtoHAsync(pinned, place, 16, stream))
    ok(driver.cuMemFreeAsync(place, stream))
    ok(driver.cuStreamSynchronize(stream))
    equal(list((ctypes.c_int32 * 4).from_address(pinned)), [6] * 4)


@case
def freeing_waits_for_work(gpu: Gpu) -> None:
    stream, place = gpu.stream(), gpu.integers(1)
    gpu.spin(stream, 100)
    took = seconds(lambda: ok(driver.cuMemFree(place)))
    assert took > 0.05, took
