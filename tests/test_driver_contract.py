"""The driver contract on the simulated driver, or with KREX_TEST_DRIVER=real on a real one."""

from __future__ import annotations

import os

import pytest
import simgpu
from contract import CASES, run_case

DRIVER = os.environ.get("KREX_TEST_DRIVER", "sim")

pytestmark = [pytest.mark.gpu] if DRIVER == "real" else []


@pytest.mark.parametrize("case", CASES)
def test_contract(case: str) -> None:
    if DRIVER == "real":
        run_case(case, "real", {})
        return
    with simgpu.device() as gpu:
        run_case(case, "sim", gpu.environment)
