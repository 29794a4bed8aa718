"""What the interposer adds to calls of the driver: a process under `krex run` that times them.

For each kind of call it times blocks through the wrapper and through the driver's own function,
in turns, with the gate open. Prints one line of JSON.

`torch N` instead: for each line on standard input, print the nanoseconds of one `add_` on a tiny
tensor, the mean of N; which process has the interposer is its parent's choice.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from gpu import driver

# So few that the device's queue never fills up.
_CALLS = 100
_COPIED = 4096


def main() -> None:
    """Be such a process: `driver LIBRARY BLOCKS`, or `torch CALLS`."""
    gc.disable()
    # Both ways on one CPU, and both processes on the same one.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if sys.argv[1] == "torch":
        _time_torch(int(sys.argv[2]))
    else:
        print(json.dumps(_time_driver(sys.argv[2], int(sys.argv[3]))), flush=True)


def real_function(name: str) -> int:
    """Return the address of the driver's own function, whatever is preloaded."""
    # Asked for by its handle, the C library's own dlsym answers, which nobody has exchanged.
    libc = ctypes.CDLL("libc.so.6")
    find = getattr(libc, "dlsym", None) or ctypes.CDLL("libdl.so.2").dlsym
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
    handle = ctypes.CDLL("libcuda.so.1")._handle
    address = find(handle, name.encode())
    if not address:
        raise RuntimeError(f"the driver has no {name}")
    return int(address)


def wrapper(name: str) -> int:
    """Return the address that a program gets, which asks for the function by name."""
    function = ctypes.CDLL("libcuda.so.1")[name]
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _time_driver(library: str, blocks: int) -> dict[str, Any]:
    gpu = driver.Gpu(bytes=2 * _COPIED)
    timing = ctypes.CDLL(library)
    for it in (timing.time_launches, timing.time_copies, timing.time_graphs):
        it.restype = ctypes.c_uint64
    stream = ctypes.c_void_p(int(gpu.stream))
    function = ctypes.c_void_p(int(gpu.functions["nothing"]))
    to, size = ctypes.c_uint64(int(gpu.memory)), ctypes.c_uint64(_COPIED)
    source = ctypes.c_uint64(int(gpu.memory) + _COPIED)
    graph = ctypes.c_void_p(int(_graph(gpu)))
    subjects: dict[str, Callable[[ctypes.c_void_p, int], int]] = {
        "cuLaunchKernel": lambda it, n: timing.time_launches(it, function, stream, n),
        "cuMemcpyAsync": lambda it, n: timing.time_copies(it, to, source, size, stream, n),
        "cuGraphLaunch": lambda it, n: timing.time_graphs(it, graph, stream, n),
    }
    found: dict[str, Any] = {
        "is_wrapped": wrapper("cuLaunchKernel") != real_function("cuLaunchKernel")
    }
    for name, run in subjects.items():
        ways = {
            "wrapper": ctypes.c_void_p(wrapper(name)),
            "direct": ctypes.c_void_p(real_function(name)),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(blocks + 5):
            # Another one first in each turn.
            order = list(ways) if number % 2 else list(reversed(ways))
            for way in order:
                took = run(ways[way], _CALLS)
                gpu.synchronize()
                if took == 0:
                    raise RuntimeError(f"{name} failed")
                if number >= 5:  # warm-up
                    times[way].append(took / _CALLS)
        found[name] = times
    return found


def _graph(gpu: driver.Gpu) -> Any:
    """Return a graph of ten launches, ready to be launched."""
    api = gpu.driver
    mode = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    driver.check(api.cuStreamBeginCapture(gpu.stream, mode))
    for _ in range(10):
        gpu.nothing()
    graph = driver.check(api.cuStreamEndCapture(gpu.stream))
    made = driver.check(api.cuGraphInstantiate(graph, 0))
    driver.check(api.cuGraphLaunch(made, gpu.stream))
    gpu.synchronize()
    return made


def _time_torch(count: int) -> None:
    import torch

    tiny = torch.zeros(8, device="cuda")
    clock = time.perf_counter_ns
    for _ in range(1000):
        tiny.add_(1)
    torch.cuda.synchronize()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = clock()
        for _ in range(count):
            tiny.add_(1)
        took = clock() - start
        torch.cuda.synchronize()
        print(took / count, flush=True)
