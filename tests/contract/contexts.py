"""Contexts, and which one is current."""

from __future__ import annotations

from cuda.bindings import driver

from contract.support import Gpu, case, create_context, equal, expect, in_thread, name, ok


@case
def a_context_is_current_per_thread(gpu: Gpu) -> None:
    device = gpu.initialise()
    equal(int(ok(driver.cuCtxGetCurrent())), 0)
    expect(driver.cuMemAlloc(4), "INVALID_CONTEXT")
    expect(driver.cuCtxSynchronize(), "INVALID_CONTEXT")
    context = gpu.context
    equal(int(ok(driver.cuCtxGetCurrent())), int(context))
    equal(int(ok(driver.cuCtxGetDevice())), int(device))
    equal(in_thread(lambda: int(ok(driver.cuCtxGetCurrent()))), 0)
    equal(in_thread(lambda: name(driver.cuMemAlloc(4))), "INVALID_CONTEXT")
    ok(driver.cuCtxSetCurrent(0))
    equal(int(ok(driver.cuCtxGetCurrent())), 0)


@case
def contexts_are_a_stack(gpu: Gpu) -> None:
    context = gpu.context
    ok(driver.cuCtxPushCurrent(context))
    ok(driver.cuCtxSetCurrent(0))
    equal(int(ok(driver.cuCtxGetCurrent())), int(context))
    equal(int(ok(driver.cuCtxPopCurrent())), int(context))
    equal(int(ok(driver.cuCtxGetCurrent())), 0)
    expect(driver.cuCtxPopCurrent(), "INVALID_CONTEXT")


@case
def the_primary_context_is_counted(gpu: Gpu) -> None:
    device = gpu.initialise()
    expect(driver.cuDevicePrimaryCtxRelease(device), "INVALID_CONTEXT")
    equal(ok(driver.cuDevicePrimaryCtxGetState(device))[1], 0)
    first = ok(driver.cuDevicePrimaryCtxRetain(device))
    second = ok(driver.cuDevicePrimaryCtxRetain(device))
    equal(int(first), int(second))
    ok(driver.cuDevicePrimaryCtxRelease(device))
    equal(ok(driver.cuDevicePrimaryCtxGetState(device))[1], 1)
    ok(driver.cuDevicePrimaryCtxRelease(device))
    equal(ok(driver.cuDevicePrimaryCtxGetState(device))[1], 0)
    expect(driver.cuDevicePrimaryCtxRelease(device), "INVALID_CONTEXT")


@case
def a_reset_takes_the_primary_context_away(gpu: Gpu) -> None:
    device = gpu.initialise()
    assert gpu.context
    ok(driver.cuDevicePrimaryCtxReset(device))
    equal(ok(driver.cuDevicePrimaryCtxGetState(device))[1], 0)
    expect(driver.cuMemAlloc(4), "CONTEXT_IS_DESTROYED")
    ok(driver.cuDevicePrimaryCtxRetain(device))
    equal(ok(driver.cuDevicePrimaryCtxGetState(device))[1], 1)


@case
def a_made_context_is_current_until_destroyed(gpu: Gpu) -> None:
    device = gpu.initialise()
    context = create_context(device)
    equal(int(ok(driver.cuCtxGetCurrent())), int(context))
    ok(driver.cuMemAlloc(4))
    ok(driver.cuCtxDestroy(context))
    equal(int(ok(driver.cuCtxGetCurrent())), 0)
    expect(driver.cuMemAlloc(4), "INVALID_CONTEXT")


@case
def a_context_can_be_destroyed_under_a_thread(gpu: Gpu) -> None:
    device = gpu.initialise()
    context = create_context(device)
    in_thread(lambda: ok(driver.cuCtxDestroy(context)))
    expect(driver.cuMemAlloc(4), "CONTEXT_IS_DESTROYED")
    expect(driver.cuCtxSynchronize(), "CONTEXT_IS_DESTROYED")
