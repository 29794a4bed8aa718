"""Which calls break a capture that runs beside them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from cuda.bindings import driver

from contract.graphs import captured, end_capture
from contract.program import PROGRAM
from contract.support import CASES, MODES, NON_BLOCKING, Gpu, name, ok

# What a call does to a capture of some stream, by what kind of call it is.
HARMLESS, UNSAFE, BREAKING = "harmless", "unsafe", "breaking"


class Bystander:
    """What calls beside a capture need; made before it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.captured, self.stream = gpu.stream(), gpu.stream()
        self.blocking = gpu.stream(0)
        self.event, self.other_event = gpu.event(), gpu.event()
        ok(driver.cuEventRecord(self.other_event, self.stream))
        ok(driver.cuStreamSynchronize(self.stream))
        self.place, self.spare = gpu.integers(4), gpu.integers(4)
        self.pinned = int(ok(driver.cuMemHostAlloc(16, 0)))
        self.pooled = int(ok(driver.cuMemAllocAsync(16, self.stream)))
        ok(driver.cuStreamSynchronize(self.stream))
        self.module = ok(driver.cuModuleLoadData(PROGRAM))
        with captured(self.stream) as graphs:
            gpu.launch("add_one", self.stream, self.place, 1)
        self.executable = ok(driver.cuGraphInstantiate(graphs[0], 0))

    def record_and_query(self) -> tuple[Any, ...]:
        """What a drain by stream does."""
        ok(driver.cuEventRecord(self.event, self.stream))
        while name(result := driver.cuEventQuery(self.event)) == "NOT_READY":
            pass
        return tuple(result)


BESIDE_A_CAPTURE: dict[str, tuple[str, Callable[[Bystander], Any]]] = {
    "cuCtxSynchronize": (BREAKING, lambda it: driver.cuCtxSynchronize()),
    "cuCtxRecordEvent": (BREAKING, lambda it: driver.cuCtxRecordEvent(it.gpu.context, it.event)),
    "cuStreamQuery, captured": (BREAKING, lambda it: driver.cuStreamQuery(it.captured)),
    "cuStreamSynchronize, captured": (
        BREAKING,
        lambda it: driver.cuStreamSynchronize(it.captured),
    ),
    "cuStreamQuery": (UNSAFE, lambda it: driver.cuStreamQuery(it.stream)),
    "cuStreamSynchronize": (UNSAFE, lambda it: driver.cuStreamSynchronize(it.stream)),
    "cuStreamSynchronize, blocking": (UNSAFE, lambda it: driver.cuStreamSynchronize(it.blocking)),
    "cuEventRecord": (HARMLESS, lambda it: driver.cuEventRecord(it.event, it.stream)),
    "cuEventQuery": (UNSAFE, lambda it: driver.cuEventQuery(it.other_event)),
    "cuEventSynchronize": (UNSAFE, lambda it: driver.cuEventSynchronize(it.other_event)),
    "cuEventRecord, cuEventQuery": (UNSAFE, lambda it: it.record_and_query()),
    "cuEventCreate": (HARMLESS, lambda it: driver.cuEventCreate(0)),
    "cuStreamCreate": (HARMLESS, lambda it: driver.cuStreamCreate(NON_BLOCKING)),
    "cuStreamIsCapturing": (HARMLESS, lambda it: driver.cuStreamIsCapturing(it.captured)),
    "cuLaunchKernel": (HARMLESS, lambda it: it.gpu.try_launch("add_one", it.stream, it.place, 1)),
    "cuLaunchKernel, legacy": (
        HARMLESS,
        lambda it: it.gpu.try_launch("add_one", None, it.place, 1),
    ),
    "cuMemcpyDtoHAsync, pinned": (
        HARMLESS,
        lambda it: driver.cuMemcpyDtoHAsync(it.pinned, it.place, 16, it.stream),
    ),
    "cuMemsetD32Async": (HARMLESS, lambda it: driver.cuMemsetD32Async(it.place, 0, 1, it.stream)),
    "cuMemAllocAsync": (UNSAFE, lambda it: driver.cuMemAllocAsync(16, it.stream)),
    "cuMemAlloc": (UNSAFE, lambda it: driver.cuMemAlloc(16)),
    "cuMemFree": (UNSAFE, lambda it: driver.cuMemFree(it.spare)),
    "cuMemHostAlloc": (UNSAFE, lambda it: driver.cuMemHostAlloc(16, 0)),
    "cuMemcpyDtoH": (HARMLESS, lambda it: driver.cuMemcpyDtoH(bytearray(16), it.place, 16)),
    "cuMemcpyHtoD": (HARMLESS, lambda it: driver.cuMemcpyHtoD(it.place, bytes(16), 16)),
    "cuMemsetD32": (HARMLESS, lambda it: driver.cuMemsetD32(it.place, 0, 1)),
    "cuMemGetInfo": (HARMLESS, lambda it: driver.cuMemGetInfo()),
    "cuModuleLoadData": (HARMLESS, lambda it: driver.cuModuleLoadData(PROGRAM)),
    "cuModuleUnload": (UNSAFE, lambda it: driver.cuModuleUnload(it.module)),
    "cuMemFreeAsync": (UNSAFE, lambda it: driver.cuMemFreeAsync(it.pooled, it.stream)),
    "cuGraphLaunch": (HARMLESS, lambda it: driver.cuGraphLaunch(it.executable, it.stream)),
    "cuEventDestroy": (HARMLESS, lambda it: driver.cuEventDestroy(it.other_event)),
    "cuCtxSetCurrent": (HARMLESS, lambda it: driver.cuCtxSetCurrent(it.gpu.context)),
    "cuStreamGetFlags, captured": (BREAKING, lambda it: driver.cuStreamGetFlags(it.captured)),
    "cuStreamGetFlags": (UNSAFE, lambda it: driver.cuStreamGetFlags(it.stream)),
}


def forbids(mode: str, own: bool, thread_mode: str) -> bool:
    """Whether a capture of this mode forbids a thread's unsafe calls, as the header has it."""
    if thread_mode == "relaxed":
        return False
    if own:
        return mode != "relaxed"
    return mode == "global" and thread_mode == "global"


def beside_a_capture(gpu: Gpu, call: str) -> None:
    kind, function = BESIDE_A_CAPTURE[call]
    found, wanted = {}, {}
    for mode, own, thread_mode in itertools.product(MODES, (True, False), MODES):
        beside = Bystander(gpu)
        ok(driver.cuStreamBeginCapture(beside.captured, MODES[mode]))
        gpu.launch("add_one", beside.captured, beside.place, 1)

        def run(thread_mode: str = thread_mode, beside: Bystander = beside) -> str:
            before = ok(driver.cuThreadExchangeStreamCaptureMode(MODES[thread_mode]))
            try:
                return name(function(beside))
            finally:
                ok(driver.cuThreadExchangeStreamCaptureMode(before))

        outcome = run() if own else gpu.thread(run)
        key = f"{mode} capture, {'own' if own else 'other'} thread, {thread_mode}"
        found[key] = f"{outcome}, then {end_capture(beside.captured)}"
        broken = kind == BREAKING or (kind == UNSAFE and forbids(mode, own, thread_mode))
        wanted[key] = (
            "STREAM_CAPTURE_UNSUPPORTED, then STREAM_CAPTURE_INVALIDATED"
            if broken
            else "SUCCESS, then SUCCESS"
        )
        ok(driver.cuCtxSynchronize())
    different = [f"{key}: {it}" for key, it in found.items() if it != wanted[key]]
    assert not different, f"not {kind}:\n" + "\n".join(different)


for _call in BESIDE_A_CAPTURE:
    CASES[f"beside a capture: {_call}"] = partial(beside_a_capture, call=_call)
