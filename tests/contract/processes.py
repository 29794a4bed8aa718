"""Forked and killed processes."""

from __future__ import annotations

import time

from cuda.bindings import driver

from contract.support import Child, Gpu, Target, case, equal, name, ok


@case
def a_forked_child_has_no_driver(gpu: Gpu) -> None:
    assert gpu.context
    place = gpu.integers(1)

    def try_all(child: Child) -> None:
        for result in (
            driver.cuInit(0),
            driver.cuDeviceGetCount(),
            driver.cuCtxSynchronize(),
            driver.cuMemAlloc(4),
            gpu.try_launch("add_one", None, place, 1),
        ):
            child.say(name(result).encode() + b"\n")

    child = Child(try_all)
    outcomes = b"".join(iter(child.hear, b"")).decode().split()
    child.end()
    equal(outcomes, ["NOT_INITIALIZED"] * 5)
    gpu.launch("add_one", None, place, 1)
    equal(gpu.read(place, 1), [1])


@case
def a_child_forked_before_initialisation_has_its_own(gpu: Gpu) -> None:
    def work(child: Child) -> None:
        place = gpu.integers(1)
        gpu.launch("add_one", None, place, 1)
        equal(gpu.read(place, 1), [1])

    children = [Child(work) for _ in range(2)]
    for child in children:
        child.end()


@case
def a_killed_process_leaves_the_device_to_others(gpu: Gpu) -> None:
    target = Target(100_000)
    assert gpu.context
    target.child.kill()
    stream = gpu.stream()
    time.sleep(0.5)
    start = gpu.record(stream)
    gpu.spin(stream, 20)
    end = gpu.record(stream)
    ok(driver.cuEventSynchronize(end))
    took = ok(driver.cuEventElapsedTime(start, end))
    assert took < 35, took
