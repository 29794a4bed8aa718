"""Captures survive whoever drains their process. Needs torch, and so a real GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from gpu.crew import read_line
from gpu_stage import Gpu
from test_clients import finish, proceed, python_program, start

pytestmark = [pytest.mark.timeout(300), pytest.mark.gpu]


def test_captures_survive_drains(gpu: Gpu, tmp_path: Path) -> None:
    command = python_program("06_torch_capture.py", "torch")(tmp_path)
    holder = gpu.crew.holder("driver")
    process = start(gpu, command)
    proceed(process)
    drained: set[str] = set()
    end = time.monotonic() + 7
    while time.monotonic() < end:
        for found in holder.measure("spin", 5, launches=5):
            drained.update(found["drained"])
            assert found["verdict"] == "clean", found["reasons"]
    assert read_line(process).startswith("submitted at least"), process.communicate()[1].decode()
    finish(process)
    assert drained & {"streams", "idle"}, drained
