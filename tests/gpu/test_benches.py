"""The benches for a GPU run, and find the wrapper and the driver's own function apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from gpu_stage import IS_REAL, ROOT, Gpu

pytestmark = [pytest.mark.timeout(300)] + ([pytest.mark.gpu] if IS_REAL else [])


def test_the_overhead_is_measured(gpu: Gpu, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    words = ["--quick", "--only", "overhead", "--json", results]
    environment = gpu.environment | {"PYTHON": sys.executable}
    done = gpu.machine.run([ROOT / "benches" / "gpu.sh", *words], env=environment, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = json.loads(results.read_text())["parts"]
    rows = {row["what"]: row["values"] for row in part["rows"]}
    assert set(rows) == {"cuLaunchKernel", "cuMemcpyAsync", "cuGraphLaunch"}
    assert all(values["direct"] > 0 for values in rows.values())
