"""The simulated driver: processes share its device, and disturb each other as on a real one.

Times are compared with generous bounds: the device's own accounting is exact, but when a process
gets to run is up to the machine.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from simgpu import LIBRARY, SimGpu, device

LIMIT = 60.0


class Client:
    """A process with the driver: see simgpu_client.py."""

    def __init__(self, gpu: SimGpu, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("simgpu_client.py"))],
            env={**os.environ, **gpu.environment, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.pid = self.process.pid

    def send(self, *words: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(" ".join(map(str, words)).encode() + b"\n")
        self.process.stdin.flush()

    def answers(self, limit: float) -> bool:
        """Whether there is an answer within so many seconds."""
        assert self.process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            return bool(selector.select(limit))

    def answer(self) -> Any:
        assert self.process.stdout
        assert self.answers(LIMIT)
        return json.loads(self.process.stdout.readline())

    def do(self, *words: object) -> Any:
        self.send(*words)
        return self.answer()

    def end(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def clients(gpu: SimGpu, count: int = 1, **environment: str) -> Iterator[list[Client]]:
    """Processes that have a context."""
    started = [Client(gpu, **environment) for _ in range(count)]
    try:
        for client in started:
            client.send("start")
        for client in started:
            client.answer()
        yield started
    finally:
        for client in started:
            client.end()


def work_at_once(workers: list[Client], count: int, milliseconds: float) -> list[float]:
    for worker in workers:
        worker.send("work", count, milliseconds)
    return [worker.answer() for worker in workers]


def test_alone_kernels_take_their_time() -> None:
    with device() as gpu, clients(gpu) as (client,):
        assert 50 <= client.do("work", 10, 5) < 150


def test_busy_processes_stretch_each_other() -> None:
    with device() as gpu, clients(gpu, 3) as workers:
        times = work_at_once(workers, 20, 10)
        # Alone it would be 200 each; together nobody is done before all 600 are, nearly.
        assert min(times) > 360
        assert max(times) > 500


def test_a_process_stretches_itself_no_more_than_that() -> None:
    with device() as gpu, clients(gpu, 2) as (busy, other):
        busy.send("work", 1, 100)
        other.do("work", 1, 10)
        # What the other did is all that it lost.
        assert 100 <= busy.answer() < 180


def test_births_and_deaths_stretch_kernels() -> None:
    with device(birth_ms=40, stretch=2) as gpu, clients(gpu, 2) as (busy, other):
        other.send("births", 10)
        assert busy.do("work", 20, 10) > 260
        other.answer()


def test_births_come_one_after_another() -> None:
    with device(birth_ms=100) as gpu, clients(gpu, 3):
        births = [it for it in gpu.journal() if it.kind in ("birth", "born")]
        assert len(births) == 6
        ends = sorted(it.time for it in births if it.kind == "born")
        assert all(after - before >= 95e6 for before, after in itertools.pairwise(ends))


def test_devices_are_independent() -> None:
    with device(devices=2) as gpu:
        first, second = Client(gpu), Client(gpu)
        try:
            first.do("start", 0)
            second.do("start", 1)
            first.do("submit", 100_000)
            assert second.do("work", 20, 10) < 360
        finally:
            first.end()
            second.end()


def test_devices_are_the_same_by_whatever_index() -> None:
    with device(devices=2) as gpu:
        first = Client(gpu, CUDA_VISIBLE_DEVICES="1")
        second = Client(gpu, CUDA_VISIBLE_DEVICES="GPU-6b726578-2d73-696d-6770-750000000001,0")
        try:
            first.do("start")
            second.do("start")
            times = work_at_once([first, second], 20, 10)
            assert min(times) > 270
        finally:
            first.end()
            second.end()


def test_work_goes_on_while_its_process_is_stopped() -> None:
    with device() as gpu, clients(gpu, 2) as (stopped, other):
        stopped.do("submit", 150)
        os.kill(stopped.pid, signal.SIGSTOP)
        # 300 together, and then the other one is alone.
        assert other.do("work", 15, 10) > 250
        assert 200 <= other.do("work", 20, 10) < 360
        os.kill(stopped.pid, signal.SIGCONT)
        assert stopped.do("synchronize") == "SUCCESS"


def test_work_of_a_killed_process_disappears_after_its_teardown() -> None:
    with device(teardown_ms=100) as gpu, clients(gpu, 2) as (killed, other):
        killed.do("submit", 100_000)
        assert other.do("work", 2, 20) > 75
        killed.process.kill()
        killed.process.wait()
        assert other.do("work", 10, 20) > 220
        assert other.do("work", 10, 20) < 360


def test_many_killed_processes_leave_room_for_others() -> None:
    with device(birth_ms=0, module_ms=0, teardown_ms=0) as gpu:
        for _ in range(4):
            with clients(gpu, 4) as workers:
                for worker in workers:
                    worker.do("submit", 100_000)
        with clients(gpu) as (client,):
            client.do("work", 1, 20)
            assert client.do("work", 10, 20) < 360


def test_endless_kernels_on_request() -> None:
    with device() as gpu, clients(gpu, 2) as (endless, other):
        gpu.fail("hang")
        endless.do("submit", 1)
        gpu.fail()
        assert other.do("work", 2, 20) > 75
        endless.send("synchronize")
        assert not endless.answers(0.3)
        gpu.fail("lost")
        assert endless.answer() == "UNKNOWN"


def test_failures_on_request() -> None:
    with device() as gpu, clients(gpu) as (client,):
        gpu.fail("memory")
        assert client.do("call", "cuMemAlloc", 4) == "OUT_OF_MEMORY"
        assert client.do("launch") == "SUCCESS"
        gpu.fail("fail:cuLaunchKernel=701")
        assert client.do("launch") == "LAUNCH_OUT_OF_RESOURCES"
        assert client.do("call", "cuMemAlloc", 4) == "SUCCESS"
        gpu.fail("sticky=700")
        assert client.do("launch") == "ILLEGAL_ADDRESS"
        assert client.do("synchronize") == "ILLEGAL_ADDRESS"
        gpu.fail("lost")
        assert client.do("call", "cuDeviceGetCount") == "UNKNOWN"


def test_locking_on_request_hangs_or_is_refused() -> None:
    with device() as gpu, clients(gpu, 2) as (locker, target):
        gpu.fail("lock=refuse")
        assert locker.do("lock", target.pid, 100) == "NOT_SUPPORTED"
        gpu.fail("lock=hang")
        locker.send("lock", target.pid, 100)
        assert not locker.answers(0.4)


@pytest.mark.parametrize("version", [12060, 12080])
def test_locking_came_with_a_version(version: int) -> None:
    with device(version=version) as gpu, clients(gpu) as (client,):
        state = client.do("call", "cuCheckpointProcessGetState", client.pid)
        assert state == ("SUCCESS" if version >= 12080 else "absent")


def test_many_threads_of_many_processes() -> None:
    with device() as gpu, clients(gpu, 3) as workers:
        for worker in workers:
            worker.send("hammer", 4, 200)
        assert all(worker.answer() for worker in workers)
        submitted = [it for it in gpu.submissions() if it.name == "cuLaunchKernel"]
        assert len(submitted) > 3 * 4 * 50


def test_a_thread_can_be_cancelled_while_it_waits() -> None:
    with device() as gpu, clients(gpu, 2) as (client, locker):
        client.do("submit", 1500)
        assert client.do("cancel") == 2**64 - 1  # PTHREAD_CANCELED
        assert client.do("synchronize") == "SUCCESS"
        # Its call is not under way any more, either.
        assert locker.do("lock", client.pid, 5000) == "SUCCESS"


def test_the_journal_has_every_submission() -> None:
    with device() as gpu, clients(gpu) as (client,):
        before = time.monotonic_ns()
        client.do("work", 3, 1)
        entries = [it for it in gpu.submissions(client.pid) if it.time > before]
        assert [it.kind for it in entries] == ["event", "launch", "launch", "launch", "event"]
        assert {it.name for it in entries} == {"cuEventRecord", "cuLaunchKernel"}
        assert len({it.stream for it in entries}) == 1
        kinds = [it.kind for it in gpu.journal(client.pid) if it.time > before]
        assert (kinds.count("busy"), kinds[-1]) == (kinds.count("idle"), "idle")


def test_loading_the_library_does_nothing() -> None:
    with device() as gpu:
        script = "import ctypes, threading, os; ctypes.CDLL('libcuda.so.1')\n"
        script += "print(len(os.listdir('/proc/self/task')))"
        environment = {**os.environ, **gpu.environment}
        output = subprocess.check_output([sys.executable, "-c", script], env=environment)
        assert output.strip() == b"1"
        assert not list(gpu.directory.iterdir())


def test_the_library_has_the_drivers_name() -> None:
    assert b"libcuda.so.1\0" in LIBRARY.read_bytes()
