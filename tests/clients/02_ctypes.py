"""The driver's library and nothing else: dlsym by name."""

from __future__ import annotations

import ctypes

import told

library = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
SIZE = ctypes.c_size_t(1 << 20)


def ok(result: int) -> None:
    assert result == 0, result


ok(library.cuInit(0))
ok(library.cuDeviceGet(ctypes.byref(device), 0))
ok(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
ok(library.cuCtxSetCurrent(context))
ok(library.cuMemAlloc_v2(ctypes.byref(memory), SIZE))
ok(library.cuMemsetD8_v2(memory, 1, SIZE))
ok(library.cuCtxSynchronize())
told.ready()
for _ in range(9):
    ok(library.cuMemsetD8Async(memory, 7, SIZE, None))
out = ctypes.create_string_buffer(16)
ok(library.cuMemcpyDtoH_v2(out, memory, ctypes.c_size_t(16)))
ok(library.cuCtxSynchronize())
assert out.raw == b"\x07" * 16
told.submitted(10)
