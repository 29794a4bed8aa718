"""Locking a process out of the driver from another."""

from __future__ import annotations

import time
from typing import Any

from cuda.bindings import driver

from contract.support import Child, Gpu, Target, case, equal, expect, ok, seconds


def lock(pid: int, milliseconds: int) -> tuple[Any, ...]:
    arguments = driver.CUcheckpointLockArgs()
    arguments.timeoutMs = milliseconds
    result: tuple[Any, ...] = driver.cuCheckpointProcessLock(pid, arguments)
    return result


def unlock(pid: int) -> tuple[Any, ...]:
    result: tuple[Any, ...] = driver.cuCheckpointProcessUnlock(pid, None)
    return result


def process_state(pid: int) -> str:
    state = ok(driver.cuCheckpointProcessGetState(pid))
    return str(state.name).removeprefix("CU_PROCESS_STATE_")


@case
def a_locked_process_waits_until_it_is_unlocked(gpu: Gpu) -> None:
    target = Target(2)
    gpu.initialise()
    pid = target.child.pid
    equal(process_state(pid), "RUNNING")
    assert target.progress(0.3) > 0
    ok(lock(pid, 5000))
    equal(process_state(pid), "LOCKED")
    # One that was under way may still be counted.
    time.sleep(0.1)
    equal(target.progress(0.3), 0)
    expect(lock(pid, 100), "ILLEGAL_STATE")
    ok(unlock(pid))
    equal(process_state(pid), "RUNNING")
    assert target.progress(0.3) > 0
    expect(unlock(pid), "ILLEGAL_STATE")
    target.end()


@case
def a_lock_waits_for_what_was_submitted(gpu: Gpu) -> None:
    target = Target(400, pause=0.1)
    gpu.initialise()
    before = target.count
    while target.count == before:
        time.sleep(0.001)
    time.sleep(0.2)  # The next kernel runs, for 400 ms from about 100 ms ago.
    before = target.count
    took = seconds(lambda: ok(lock(target.child.pid, 5000)))
    time.sleep(0.1)
    assert 0.1 < took < 2, took
    ok(unlock(target.child.pid))
    assert target.count >= before
    target.end()


@case
def a_lock_that_comes_too_late_is_none(gpu: Gpu) -> None:
    target = Target(1000)
    gpu.initialise()
    time.sleep(0.2)
    expect(lock(target.child.pid, 50), "NOT_READY")
    equal(process_state(target.child.pid), "RUNNING")
    before = target.count
    deadline = time.monotonic() + 20
    while target.count < before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    target.end()


@case
def a_process_without_the_driver_cannot_be_locked(gpu: Gpu) -> None:
    def wait(child: Child) -> None:
        child.hear()

    child = Child(wait)
    gpu.initialise()
    expect(lock(child.pid, 1000), "NOT_INITIALIZED")
    child.say()
    child.end()


@case
def a_locked_process_can_be_killed(gpu: Gpu) -> None:
    target = Target(2)
    gpu.initialise()
    ok(lock(target.child.pid, 5000))
    target.child.kill()
    gpu.spin(gpu.stream(), 1)
    ok(driver.cuCtxSynchronize())
