"""A sibling that loads the GPU, by the word on its command line; ends with standard input.

idle       makes a context and submits nothing
saturate   keeps all multiprocessors and the memory busy, a few launches ahead
flood      has as much work outstanding as it can, over and over: to be killed in the middle of it
birth      makes a context and exits
contexts   makes and destroys the primary context, over and over
"""

from __future__ import annotations

import sys
import threading

from gpu import driver

# Launches that a saturating sibling is ahead of the device: two halves of this.
_AHEAD = 8
# Launches that a flooding one has outstanding: some tens of milliseconds of a GPU's whole power.
_FLOOD = 200


def main() -> None:
    """Be such a sibling."""
    kind = sys.argv[1]
    if kind == "birth":
        driver.make_context()
        return
    gpu = driver.Gpu(bytes=1 << 20) if kind in ("idle", "contexts") else driver.Gpu()
    done = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        done.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    if kind == "saturate":
        _saturate(gpu, done)
    elif kind == "flood":
        _flood(gpu, done)
    elif kind == "contexts":
        _contexts(gpu, done)
    elif kind == "idle":
        print("ready", flush=True)
        done.wait()
    else:
        sys.exit(f"unknown kind {kind!r}")


def _saturate(gpu: driver.Gpu, done: threading.Event) -> None:
    events = [gpu.event(driver.NO_TIMING) for _ in range(2)]
    turn = 0
    while not done.is_set():
        for _ in range(_AHEAD // 2):
            gpu.fill()
        gpu.record(events[turn % 2])
        if turn == 2:
            print("ready", flush=True)
        turn += 1
        if turn > 1:
            # The half before is done; the one that was just launched keeps the device busy.
            driver.check(gpu.driver.cuEventSynchronize(events[turn % 2]))
    gpu.synchronize()


def _flood(gpu: driver.Gpu, done: threading.Event) -> None:
    told = False
    while not done.is_set():
        for _ in range(_FLOOD):
            gpu.fill()
        if not told:
            print("ready", flush=True)
            told = True
        gpu.synchronize()


def _contexts(gpu: driver.Gpu, done: threading.Event) -> None:
    api = gpu.driver
    print("ready", flush=True)
    while not done.is_set():
        driver.check(api.cuDevicePrimaryCtxReset(gpu.device))
        context = driver.check(api.cuDevicePrimaryCtxRetain(gpu.device))
        driver.check(api.cuCtxSetCurrent(context))
        driver.check(api.cuCtxSynchronize())
