"""Fixtures of the tests that use a GPU, and their tables at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_stage import IS_REAL, Gpu, Results, make_gpu

# The simulated driver runs no torch.
collect_ignore = [] if IS_REAL else ["test_captures.py"]
RESULTS = pytest.StashKey[Results]()


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with make_gpu() as made:
        yield made


@pytest.fixture(scope="session")
def results(request: pytest.FixtureRequest) -> Results:
    return request.config.stash.setdefault(RESULTS, Results())


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    found = config.stash.get(RESULTS, None)
    if found is None or not found.rows:
        return
    terminalreporter.section("timings on the " + ("GPU" if IS_REAL else "simulated GPU"))
    for line in found.lines():
        terminalreporter.write_line(line)
    if path := os.environ.get("KREX_GPU_RESULTS"):
        Path(path).write_text(json.dumps(found.rows, indent=1) + "\n")
