"""Eight threads of one process."""

from __future__ import annotations

import threading
from typing import Any

import told
from cuda.bindings import driver

THREADS, EACH = 8, 50


def ok(result: tuple[Any, ...]) -> Any:
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


ok(driver.cuInit(0))
context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
ok(driver.cuCtxSetCurrent(context))
places = [ok(driver.cuMemAlloc(1 << 16)) for _ in range(THREADS)]
streams = [ok(driver.cuStreamCreate(1)) for _ in range(THREADS)]
results: list[int] = []


def work(place: Any, stream: Any) -> None:
    ok(driver.cuCtxSetCurrent(context))
    for value in range(EACH):
        ok(driver.cuMemsetD8Async(place, value, 1 << 16, stream))
    ok(driver.cuStreamSynchronize(stream))
    out = bytearray(1)
    ok(driver.cuMemcpyDtoH(out, place, 1))
    results.append(out[0])


ok(driver.cuCtxSynchronize())
told.ready()
threads = [threading.Thread(target=work, args=it) for it in zip(places, streams, strict=True)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == [EACH - 1] * THREADS
told.submitted(THREADS * (EACH + 1))
