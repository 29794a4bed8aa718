"""What every test stands on: a runtime directory of its own, and a clean machine afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from harness import Machine
from simgpu import SimGpu, device

# What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A runtime directory of its own; at the end nothing of it may be left anywhere."""
    machine = Machine()
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture(params=["cgroup2", "sigstop"])
def freezing_machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """The same, once per freezer."""
    machine = Machine(freezer=request.param)
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture
def simgpu() -> Iterator[SimGpu]:
    """A simulated device: processes with its environment share it."""
    with device() as gpu:
        yield gpu


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("KREX_TESTS_NO_SKIP"):
        report.outcome = "failed"
        report.longrepr = f"skipped, where every test has to run: {report.longrepr}"
    return report
