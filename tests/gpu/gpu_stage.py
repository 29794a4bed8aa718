"""A GPU for these tests: the simulated one, or with KREX_TEST_DRIVER=real the machine's first."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simgpu
from harness import LIMIT, Machine
from krex._text import table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benches"))

from gpu.crew import Crew, program  # noqa: E402 - from where it is

IS_REAL = os.environ.get("KREX_TEST_DRIVER", "sim") == "real"


@dataclass
class Gpu:
    """The device, and a runtime directory of its own."""

    machine: Machine
    environment: dict[str, str]
    device: str

    def start(self, command: Any, **options: Any) -> subprocess.Popen[bytes]:
        """Start a process that is ended with the test."""
        options.setdefault("env", self.environment)
        return self.machine.start(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            **options,
        )

    @property
    def crew(self) -> Crew:
        return Crew(self.start, self.device)


@contextlib.contextmanager
def make_gpu() -> Iterator[Gpu]:
    """Use the device; at the end nothing may be left of what was started."""
    with contextlib.ExitStack() as stack:
        environment: dict[str, str] = {}
        if not IS_REAL:
            environment = stack.enter_context(simgpu.device()).environment
        machine = Machine()
        stack.callback(machine.close)
        done = machine.run(program("driver"), env=environment, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        yield Gpu(machine, environment, done.stdout.split()[0])


@dataclass
class Results:
    """Tables that the tests fill, shown at the end and written to KREX_GPU_RESULTS."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        self.rows.append(row)

    def lines(self) -> list[str]:
        header = [name for name in self.rows[0] if name != "reasons"]
        cells = [[_cell(row[name]) for name in header] for row in self.rows]
        text = table(header, cells)
        reasons = {reason for row in self.rows for reason in row["reasons"]}
        return text + [f"  {it}" for it in sorted(reasons)[:20]]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)
