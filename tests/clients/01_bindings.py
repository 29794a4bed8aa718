"""NVIDIA's Python bindings: they ask cuGetProcAddress for everything."""

from __future__ import annotations

from typing import Any

import told
from cuda.bindings import driver

PROGRAM = b"""
// krex-simgpu: kernel nothing() for 5 us
.version 7.8
.target sm_80
.address_size 64
.visible .entry nothing() { ret; }
"""


def ok(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


def launch() -> None:
    ok(driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))


ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))))
function = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(PROGRAM)), b"nothing"))
memory = ok(driver.cuMemAlloc(1 << 20))
launch()
ok(driver.cuCtxSynchronize())
told.ready()
for _ in range(5):
    launch()
ok(driver.cuMemsetD8(memory, 7, 1 << 20))
out = bytearray(16)
ok(driver.cuMemcpyDtoH(out, memory, 16))
ok(driver.cuCtxSynchronize())
assert out == b"\x07" * 16
told.submitted(7)
