"""A client of the simulated driver that works when told: see test_simgpu.py.

Each line of input is a word and its arguments; each gets one line of JSON back.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from contract.support import Gpu, create_context, name, ok
from cuda.bindings import driver


class Client:
    def __init__(self) -> None:
        self.gpu = Gpu("sim")
        self.stream: Any = None

    def start(self, device: str = "0") -> None:
        """Make a context, and load the program."""
        self.gpu.device = int(device)
        self.stream = self.gpu.stream()

    def work(self, count: str, milliseconds: str) -> float:
        """Run kernels one after the other; returns what events say, in milliseconds."""
        before = self.gpu.record(self.stream)
        for _ in range(int(count)):
            self.gpu.spin(self.stream, float(milliseconds))
        after = self.gpu.record(self.stream)
        ok(driver.cuEventSynchronize(after))
        return float(ok(driver.cuEventElapsedTime(before, after)))

    def submit(self, milliseconds: str) -> None:
        """Launch a kernel, and don't wait."""
        self.gpu.spin(self.stream, float(milliseconds))

    def births(self, count: str) -> None:
        """Make and destroy contexts."""
        for _ in range(int(count)):
            ok(driver.cuCtxDestroy(create_context(ok(driver.cuDeviceGet(0)))))

    def call(self, entry: str, *arguments: str) -> str:
        """What a driver function returns for integers."""
        try:
            return name(getattr(driver, entry)(*map(int, arguments)))
        except RuntimeError:  # The bindings found no such function in the driver.
            return "absent"

    def lock(self, pid: str, milliseconds: str) -> str:
        arguments = driver.CUcheckpointLockArgs()
        arguments.timeoutMs = int(milliseconds)
        return name(driver.cuCheckpointProcessLock(int(pid), arguments))

    def launch(self) -> str:
        return name(self.gpu.try_launch("spin", self.stream, 1000))

    def cancel(self) -> int | None:
        """Cancel a thread that waits for the stream; returns what it ended with."""
        # A thread without Python in it: its start routine is the driver's function.
        libc, library = ctypes.CDLL(None), ctypes.CDLL("libcuda.so.1")
        wait = ctypes.cast(library.cuStreamSynchronize, ctypes.c_void_p)
        thread, ended = ctypes.c_ulong(), ctypes.c_void_p()
        stream = ctypes.c_void_p(int(self.stream))
        assert libc.pthread_create(ctypes.byref(thread), None, wait, stream) == 0
        time.sleep(0.1)
        assert libc.pthread_cancel(thread) == 0
        assert libc.pthread_join(thread, ctypes.byref(ended)) == 0
        return ended.value

    def hammer(self, threads: str, count: str) -> bool:
        """Work in many threads at once; returns whether each got what it should."""

        def work(seed: int) -> bool:
            chance = random.Random(seed)
            ok(driver.cuCtxSetCurrent(self.gpu.context))
            stream, place = self.gpu.stream(chance.choice([0, 1])), self.gpu.integers(1)
            event = self.gpu.event()
            added = 0
            for _ in range(int(count)):
                match chance.randrange(6):
                    case 0 | 1 | 2:
                        self.gpu.launch("slow_add", stream, place, 1, chance.randrange(50_000))
                        added += 1
                    case 3:
                        ok(driver.cuEventRecord(event, stream))
                        ok(driver.cuStreamWaitEvent(stream, event, 0))
                    case 4:
                        ok(driver.cuStreamSynchronize(stream))
                    case 5:
                        spare = ok(driver.cuMemAllocAsync(64, stream))
                        ok(driver.cuMemFreeAsync(spare, stream))
            ok(driver.cuStreamSynchronize(stream))
            return self.gpu.read(place, 1) == [added]

        with ThreadPoolExecutor(int(threads)) as pool:
            return all(pool.map(work, range(int(threads))))

    def synchronize(self) -> str:
        return name(driver.cuStreamSynchronize(self.stream))


def main() -> None:
    client = Client()
    for line in sys.stdin:
        word, *arguments = line.split()
        method: Callable[..., Any] = getattr(client, word)
        print(json.dumps(method(*arguments)), flush=True)


if __name__ == "__main__":
    main()
