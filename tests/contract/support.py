"""What the cases stand on: calls and their results, a device, threads and processes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from cuda.bindings import driver

from contract.program import PROGRAM

T = TypeVar("T")
Case = Callable[["Gpu"], None]

CASES: dict[str, Case] = {}


MILLISECOND = 1_000_000
LEGACY = driver.CUstream(1)
PER_THREAD = driver.CUstream(2)
NON_BLOCKING = 1
NO_TIMING = 2
MODES = {
    "global": driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
    "thread_local": driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    "relaxed": driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def name(result: Any) -> str:
    """What a call returned, without the prefix that all names share."""
    status = result[0] if isinstance(result, tuple) else result
    return str(status.name).removeprefix("CUDA_ERROR_").removeprefix("CUDA_")


def ok(result: tuple[Any, ...]) -> Any:
    """The value of a call that has to succeed."""
    assert name(result) == "SUCCESS", name(result)
    values = result[1:]
    return values[0] if len(values) == 1 else values


def expect(result: tuple[Any, ...], *wanted: str) -> None:
    assert name(result) in wanted, f"{name(result)}, not {' or '.join(wanted)}"


def equal(found: object, wanted: object) -> None:
    assert found == wanted, f"{found!r}, not {wanted!r}"


def in_thread(function: Callable[[], T]) -> T:
    """Call it in a thread of its own, and return what it returned."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


class Child:
    """A forked process that runs a function, which can be talked with by bytes."""

    def __init__(self, function: Callable[[Child], None]) -> None:
        here, there = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                self._read, self._write = here[0], there[1]
                function(self)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        self._read, self._write = there[0], here[1]
        os.close(here[0])
        os.close(there[1])

    def say(self, word: bytes = b".") -> None:
        os.write(self._write, word)

    def hear(self, seconds: float = 20.0) -> bytes:
        """One byte from the other side; b"" if none comes."""
        if not select.select([self._read], [], [], seconds)[0]:
            return b""
        return os.read(self._read, 1)

    def end(self) -> None:
        """Wait for its end, which has to be a good one."""
        _, status = os.waitpid(self.pid, 0)
        equal(os.waitstatus_to_exitcode(status), 0)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


class Gpu:
    """A device, the first one, with a context and the program, made when they are first needed."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.device = 0
        self._functions: dict[str, Any] = {}
        self._context: Any = None

    def initialise(self) -> Any:
        """cuInit, and the device."""
        ok(driver.cuInit(0))
        return ok(driver.cuDeviceGet(self.device))

    @property
    def context(self) -> Any:
        if self._context is None:
            device = self.initialise()
            self._context = ok(driver.cuDevicePrimaryCtxRetain(device))
            ok(driver.cuCtxSetCurrent(self._context))
            self._load()
        return self._context

    def _load(self) -> None:
        module = ok(driver.cuModuleLoadData(PROGRAM))
        for function in (b"spin", b"add_one", b"slow_add", b"crash"):
            self._functions[function.decode()] = ok(driver.cuModuleGetFunction(module, function))
        # The first launches load code; no case should measure that.
        self.launch("spin", None, 1000)
        self.launch("add_one", None, self.integers(1), 1)
        self.launch("slow_add", None, self.integers(1), 1, 0)
        ok(driver.cuCtxSynchronize())

    def second(self) -> Gpu:
        """The same device with another context, which is not current afterwards."""
        assert self.context
        other = Gpu(self.kind)
        other._context = create_context(self.initialise())
        other._load()
        ok(driver.cuCtxPopCurrent())
        return other

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """With this context current."""
        ok(driver.cuCtxPushCurrent(self.context))
        yield
        ok(driver.cuCtxPopCurrent())

    def function(self, kernel: str) -> Any:
        assert self.context
        return self._functions[kernel]

    def pinned(self, count: int) -> Any:
        """Pinned host memory for 32-bit integers, all -1."""
        assert self.context
        address = int(ok(driver.cuMemHostAlloc(4 * count, 0)))
        words = (ctypes.c_int32 * count).from_address(address)
        words[:] = [-1] * count
        return words

    def try_launch(self, kernel: str, stream: Any, *values: int) -> tuple[Any, ...]:
        types = {"spin": "Q", "add_one": "QI", "slow_add": "QIQ", "crash": ""}[kernel]
        kinds = {"Q": ctypes.c_uint64, "I": ctypes.c_uint32}
        arguments = (values, tuple(kinds[it] for it in types)) if values else 0
        sizes = (1,) * 6
        function = self.function(kernel)
        result: tuple[Any, ...] = driver.cuLaunchKernel(
            function, *sizes, 0, stream or 0, arguments, 0
        )
        return result

    def launch(self, kernel: str, stream: Any, *values: int) -> None:
        ok(self.try_launch(kernel, stream, *values))

    def spin(self, stream: Any, milliseconds: float) -> None:
        self.launch("spin", stream, int(milliseconds * MILLISECOND))

    def integers(self, count: int) -> int:
        """Device memory for 32-bit integers, all 0."""
        assert self.context
        place = int(ok(driver.cuMemAlloc(4 * count)))
        ok(driver.cuMemsetD32(place, 0, count))
        return place

    def read(self, place: int, count: int) -> list[int]:
        out = bytearray(4 * count)
        ok(driver.cuMemcpyDtoH(out, place, len(out)))
        return list(struct.unpack(f"{count}i", out))

    def stream(self, flags: int = NON_BLOCKING) -> Any:
        assert self.context
        return ok(driver.cuStreamCreate(flags))

    def event(self, flags: int = 0) -> Any:
        assert self.context
        return ok(driver.cuEventCreate(flags))

    def record(self, stream: Any) -> Any:
        """A new event, recorded in a stream."""
        event = self.event()
        ok(driver.cuEventRecord(event, stream or 0))
        return event

    def thread(self, function: Callable[[], T]) -> T:
        """Call it in a thread of its own, with the same context."""

        def run() -> T:
            ok(driver.cuCtxSetCurrent(self.context))
            return function()

        return in_thread(run)


def create_context(device: Any) -> Any:
    """cuCtxCreate, in whichever form the bindings have it."""
    try:
        return ok(driver.cuCtxCreate(None, 0, device))
    except TypeError:
        return ok(driver.cuCtxCreate(0, device))


def seconds(function: Callable[[], object]) -> float:
    before = time.monotonic()
    function()
    return time.monotonic() - before


class Target:
    """A process that launches and counts, to be locked by others."""

    def __init__(self, milliseconds: float, pause: float = 0.0) -> None:
        self.milliseconds, self.pause = milliseconds, pause
        self._shared = mmap.mmap(-1, 8)
        self.child = Child(self._run)
        assert self.child.hear() == b"r"

    def _run(self, child: Child) -> None:
        gpu = Gpu("")
        stream = gpu.stream()
        child.say(b"r")
        while child.hear(self.pause) == b"":
            gpu.spin(stream, self.milliseconds)
            ok(driver.cuStreamSynchronize(stream))
            self._shared[:8] = struct.pack("q", self.count + 1)

    @property
    def count(self) -> int:
        return int(struct.unpack("q", self._shared[:8])[0])

    def progress(self, wait: float) -> int:
        """How many launches it finishes in a time."""
        before = self.count
        time.sleep(wait)
        return self.count - before

    def end(self) -> None:
        self.child.say()
        self.child.end()


def run_case(case_name: str, kind: str, environment: dict[str, str], limit: float = 60.0) -> None:
    """Run a case in a process of its own.

    Raises AssertionError with what the process said.
    """
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        # One's own group: whatever it started ends with it.
        os.setpgid(0, 0)
        text = ""
        try:
            os.environ.update(environment)
            if kind == "sim":
                # By its name it is found from then on, as if it were installed.
                ctypes.CDLL(environment["KREX_SIMGPU_LIBRARY"], ctypes.RTLD_GLOBAL)
            CASES[case_name](Gpu(kind))
            text = "passed"
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(there, text.encode()[-60_000:])
            os._exit(0)
    os.close(there)
    said, deadline = b"", time.monotonic() + limit
    while True:
        ready = select.select([here], [], [], max(0.0, deadline - time.monotonic()))[0]
        chunk = os.read(here, 65536) if ready else b"" if said else None
        if not chunk:
            break
        said += chunk
    os.close(here)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, ending = os.waitpid(pid, 0)
    assert chunk is not None, f"not within {limit} s"
    if said != b"passed":
        raise AssertionError(said.decode() or f"ended with {ending}")
