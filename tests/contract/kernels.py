"""Launching, and what faults do."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from contract.program import PROGRAM
from contract.support import Gpu, case, equal, expect, name, ok


@case
def bad_launches_are_refused(gpu: Gpu) -> None:
    spin = gpu.function("spin")
    arguments = ((1000,), (ctypes.c_uint64,))
    for sizes in ((0, 1, 1, 1, 1, 1), (1, 1, 1, 0, 1, 1), (1, 1, 1, 2048, 1, 1)):
        expect(driver.cuLaunchKernel(spin, *sizes, 0, 0, arguments, 0), "INVALID_VALUE")
    ok(driver.cuCtxSynchronize())


@case
def modules_and_libraries_have_functions(gpu: Gpu) -> None:
    assert gpu.context
    module = ok(driver.cuModuleLoadData(PROGRAM))
    expect(driver.cuModuleGetFunction(module, b"nothing"), "NOT_FOUND")
    function = ok(driver.cuModuleGetFunction(module, b"add_one"))
    threads = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    assert ok(driver.cuFuncGetAttribute(threads, function)) > 0
    expect(driver.cuModuleLoadData(b"nonsense"), "INVALID_IMAGE", "INVALID_PTX")
    library = ok(driver.cuLibraryLoadData(PROGRAM, None, None, 0, None, None, 0))
    expect(driver.cuLibraryGetKernel(library, b"nothing"), "NOT_FOUND")
    kernel = ok(driver.cuLibraryGetKernel(library, b"add_one"))
    place = gpu.integers(2)
    for it in (function, ok(driver.cuKernelGetFunction(kernel))):
        arguments = ((place, 2), (ctypes.c_uint64, ctypes.c_uint32))
        ok(driver.cuLaunchKernel(it, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0))
    equal(gpu.read(place, 2), [2, 2])
    ok(driver.cuModuleUnload(module))
    ok(driver.cuLibraryUnload(library))


@case
def the_other_ways_to_launch_do_the_same(gpu: Gpu) -> None:
    stream, place = gpu.stream(), gpu.integers(2)
    arguments = ((place, 2), (ctypes.c_uint64, ctypes.c_uint32))
    add = gpu.function("add_one")
    configuration = driver.CUlaunchConfig()
    configuration.gridDimX = configuration.gridDimY = configuration.gridDimZ = 1
    configuration.blockDimX = configuration.blockDimY = configuration.blockDimZ = 1
    configuration.hStream = stream
    configuration.numAttrs = 0
    ok(driver.cuLaunchKernelEx(configuration, add, arguments, 0))
    ok(driver.cuLaunchCooperativeKernel(add, 1, 1, 1, 1, 1, 1, 0, stream, arguments))
    ok(driver.cuStreamSynchronize(stream))
    equal(gpu.read(place, 2), [2, 2])


@case
def a_fault_is_returned_by_every_later_call(gpu: Gpu) -> None:
    stream, event, place = gpu.stream(), gpu.event(), gpu.integers(1)
    gpu.launch("crash", stream)
    expect(driver.cuStreamSynchronize(stream), "ILLEGAL_ADDRESS")
    outcomes = {
        "cuCtxSynchronize": driver.cuCtxSynchronize(),
        "cuStreamSynchronize": driver.cuStreamSynchronize(stream),
        "cuStreamQuery": driver.cuStreamQuery(stream),
        "cuEventRecord": driver.cuEventRecord(event, stream),
        "cuEventQuery": driver.cuEventQuery(event),
        "cuMemAlloc": driver.cuMemAlloc(4),
        "cuMemcpyDtoH": driver.cuMemcpyDtoH(bytearray(4), place, 4),
        "cuLaunchKernel": gpu.try_launch("spin", stream, 1000),
        "cuStreamCreate": driver.cuStreamCreate(0),
    }
    equal(
        {key: name(it) for key, it in outcomes.items()}, dict.fromkeys(outcomes, "ILLEGAL_ADDRESS")
    )
    ok(driver.cuDeviceGetCount())
    ok(driver.cuCtxGetCurrent())


@case
def a_drain_sees_the_fault(gpu: Gpu) -> None:
    stream, event = gpu.stream(), gpu.event()
    gpu.launch("crash", stream)
    driver.cuEventRecord(event, stream)
    expect(driver.cuEventSynchronize(event), "ILLEGAL_ADDRESS")
