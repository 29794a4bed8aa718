"""A user of the CUDA driver, for actors: what it does is told one function at a time."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver

PROGRAM = b"""
// krex-simgpu: kernel spin(u64) for arg0 ns
// krex-simgpu: kernel forever() hang
// krex-simgpu: kernel crash() for 10 us fault 700
"""

NON_BLOCKING = 1
streams: list[Any] = []
functions: dict[str, Any] = {}
state: dict[str, Any] = {}


def check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    assert int(status) == 0, status
    return values[0] if len(values) == 1 else values


def begin(count: int = 2, flags: int = NON_BLOCKING, ordinal: int = 0) -> str:
    """Make a context, a module and streams; returns krex's name for the device."""
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(ordinal))
    context = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxSetCurrent(context))
    module = check(driver.cuModuleLoadData(PROGRAM))
    for name in ("spin", "forever", "crash"):
        functions[name] = check(driver.cuModuleGetFunction(module, name.encode()))
    streams.extend(check(driver.cuStreamCreate(flags)) for _ in range(count))
    state.update(device=device, context=context, memory=check(driver.cuMemAlloc(1 << 20)))
    uuid = check(driver.cuDeviceGetUuid(device)).bytes.hex()
    return f"GPU-{uuid[:8]}-{uuid[8:12]}-{uuid[12:16]}-{uuid[16:20]}-{uuid[20:32]}"


def launch(name: str = "spin", seconds: float = 0.0, stream: int | None = None) -> None:
    """Launch a kernel on one of the streams, or on the default one."""
    check(driver.cuCtxSetCurrent(state["context"]))
    handle = 0 if stream is None else streams[stream]
    arguments: Any = 0
    if name == "spin":
        arguments = ((round(seconds * 1e9),), (ctypes.c_uint64,))
    check(driver.cuLaunchKernel(functions[name], 1, 1, 1, 1, 1, 1, 0, handle, arguments, 0))


def synchronize() -> int:
    return int(driver.cuCtxSynchronize()[0])


def set_memory(count: int, threads: int = 1) -> None:
    """Submit `count` fills in each of so many threads."""

    def work() -> None:
        check(driver.cuCtxSetCurrent(state["context"]))
        for _ in range(count):
            check(driver.cuMemsetD8Async(state["memory"], 1, 1024, 0))

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    synchronize()


def begin_capture(mode: str, stream: int = 0) -> None:
    """Begin a capture in one of the three modes."""
    modes = driver.CUstreamCaptureMode
    chosen = {
        "global": modes.CU_STREAM_CAPTURE_MODE_GLOBAL,
        "thread_local": modes.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        "relaxed": modes.CU_STREAM_CAPTURE_MODE_RELAXED,
    }[mode]
    check(driver.cuStreamBeginCapture(streams[stream], chosen))
    launch(stream=stream)


def end_capture(stream: int = 0) -> int:
    """End it, and launch what was captured; returns the number of its nodes."""
    launch(stream=stream)
    graph = check(driver.cuStreamEndCapture(streams[stream]))
    _, count = check(driver.cuGraphGetNodes(graph, 0))
    executable = check(driver.cuGraphInstantiate(graph, 0))
    check(driver.cuGraphLaunch(executable, streams[stream]))
    check(driver.cuStreamSynchronize(streams[stream]))
    return int(count)


def copy_back(seconds: float) -> int:
    """Wait inside of the driver: a copy behind a long kernel."""
    launch(seconds=seconds)
    out = bytearray(16)
    return int(driver.cuMemcpyDtoH(out, state["memory"], 16)[0])


def reset() -> None:
    """End the primary context with all that is in it, and make another."""
    launch(seconds=0.05, stream=0)
    check(driver.cuDevicePrimaryCtxReset(state["device"]))
    streams.clear()
    begin()


def second_context(capture: bool = False) -> None:
    """Make another context with work on its streams; one of them is destroyed."""
    context = make_context()
    module = check(driver.cuModuleLoadData(PROGRAM))
    spin = check(driver.cuModuleGetFunction(module, b"spin"))
    mine = [check(driver.cuStreamCreate(0 if capture else NON_BLOCKING)) for _ in range(2)]
    arguments = ((50_000_000,), (ctypes.c_uint64,))
    for stream in (*mine, 0):
        check(driver.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))
    check(driver.cuStreamDestroy(mine[1]))
    if capture:
        chosen = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        check(driver.cuStreamBeginCapture(mine[0], chosen))
    state.update(second=context)


def make_context() -> Any:
    """cuCtxCreate, in whichever form the bindings have it."""
    try:
        return check(driver.cuCtxCreate(None, 0, state["device"]))
    except TypeError:
        return check(driver.cuCtxCreate(0, state["device"]))


def end_second_context(with_current: bool = True) -> None:
    if not with_current:
        check(driver.cuCtxSetCurrent(0))
    check(driver.cuCtxDestroy(state["second"]))
    check(driver.cuCtxSetCurrent(state["context"]))


def record_from_second_context(stream: int) -> None:
    """Use a stream while another context is current."""
    event = check(driver.cuEventCreate(0))
    make_context()
    check(driver.cuEventRecord(event, streams[stream]))
    check(driver.cuCtxPopCurrent())


def end_capture_elsewhere(stream: int = 0) -> str:
    """Another thread tries to end a capture; returns what it was told."""
    said: list[str] = []

    def end() -> None:
        check(driver.cuCtxSetCurrent(state["context"]))
        said.append(driver.cuStreamEndCapture(streams[stream])[0].name)

    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    return said[0]


def launch_on_many(count: int, seconds: float) -> None:
    """Launch on so many streams; the last one takes a while."""
    more = [check(driver.cuStreamCreate(NON_BLOCKING)) for _ in range(count)]
    first = len(streams)
    streams.extend(more)
    for index in range(count):
        launch(seconds=seconds if index == count - 1 else 0.0, stream=first + index)


def work_at_random(seed: int, regions: int) -> list[dict[str, Any]]:
    """Submit whatever a program may, and hold so many regions; returns what each was like."""
    from krex import region

    chosen = random.Random(seed)
    held: list[dict[str, Any]] = []

    def submit() -> None:
        launch(seconds=chosen.choice([0, 1e-4, 2e-3]), stream=chosen.choice([0, 1, None]))

    def fill() -> None:
        check(driver.cuMemsetD8(state["memory"], 1, 4096))

    def copy() -> None:
        check(driver.cuMemcpyDtoH(bytearray(64), state["memory"], 64))

    def capture() -> None:
        begin_capture(chosen.choice(["global", "thread_local", "relaxed"]))
        time.sleep(chosen.choice([0, 2e-3]))
        end_capture()

    def allocate() -> None:
        memory = check(driver.cuMemAlloc(4096))
        check(driver.cuMemFree(memory))

    def replace_stream() -> None:
        launch(seconds=1e-3, stream=1)
        destroy_stream(1)
        streams.append(check(driver.cuStreamCreate(NON_BLOCKING)))

    def hold() -> None:
        with region.critical(drain_timeout=20) as critical:
            entered = time.monotonic_ns()
            for _ in range(chosen.randrange(4)):
                submit()
            # Without synchronising: its end waits.
            left = time.monotonic_ns()
        report = critical.report
        reasons = list(report.reasons)
        held.append({"entered": entered, "left": left, "verdict": report.verdict, "why": reasons})

    others = [submit, submit, submit, fill, copy, capture, allocate, replace_stream]
    while len(held) < regions:
        for _ in range(chosen.randrange(12)):
            chosen.choice(others)()
        hold()
        time.sleep(chosen.choice([0, 1e-3, 2e-2]))
    synchronize()
    return held


def destroy_stream(stream: int, with_current: bool = True) -> None:
    if not with_current:
        check(driver.cuCtxSetCurrent(0))
    check(driver.cuStreamDestroy(streams.pop(stream)))
    check(driver.cuCtxSetCurrent(state["context"]))


def call_all(names: list[tuple[str, int]], done: str) -> None:
    """Call functions of the driver by name, each in a thread, with all arguments zero.

    Writes a line to the file `done` as each returns: its name, when it began and ended, and what
    it returned.
    """
    library = ctypes.CDLL("libcuda.so.1")
    lines: list[str] = []

    def work(name: str, count: int) -> None:
        check(driver.cuCtxSetCurrent(state["context"]))
        began = time.monotonic_ns()
        # Wide enough for a structure that is passed by value, and zero everywhere.
        result = getattr(library, name)(*[ctypes.c_uint64(0)] * (count + 8))
        lines.append(f"{name} {began} {time.monotonic_ns()} {result}")

    threads = [threading.Thread(target=work, args=it) for it in names]
    for thread in threads:
        thread.start()
    Path(f"{done}.started").touch()
    for thread in threads:
        thread.join()
    Path(done).write_text("\n".join(lines))


def start_child(device: str, held: str, go: str, drain_timeout: float = 5) -> int:
    """Start a child that holds a region on the device until the file `go` is there."""
    code = (
        "import json, pathlib, sys, time\n"
        "from krex import region\n"
        "device, held, go, limit = sys.argv[1:]\n"
        "with region.critical(device=device, drain_timeout=float(limit)) as critical:\n"
        "    pathlib.Path(held).touch()\n"
        "    while not pathlib.Path(go).exists(): time.sleep(0.002)\n"
        "pathlib.Path(held).write_text(json.dumps(critical.report.to_dict()))\n"
    )
    words = [device, held, go, str(drain_timeout)]
    state["child"] = subprocess.Popen([sys.executable, "-c", code, *words])
    return int(state["child"].pid)


def wait_for_child() -> int:
    return int(state["child"].wait())


def fork_and_submit(count: int) -> dict[str, Any]:
    """Have a forked child make a context of its own and submit; returns its status and pid."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            begin()
            set_memory(count)
            status = 0
        finally:
            os._exit(status)
    return {"pid": child, "status": os.waitpid(child, 0)[1]}


def fork_and_idle() -> int:
    """Fork with the driver in use; the child touches nothing of it. Returns its status."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    return os.waitpid(child, 0)[1]


def exec_python(code: str) -> str:
    """Run another interpreter with this environment; returns its output."""
    return subprocess.run(
        [sys.executable, "-c", code], check=True, text=True, stdout=subprocess.PIPE
    ).stdout


def kill_self_at(seconds: float) -> None:
    """Be killed after a while, wherever this process is then."""
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
