"""`krex bench` for a GPU, as far as it needs none: what it runs, and what it says of the results.

What the built-in commands do with torch is only run on a real GPU.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simgpu
from krex import UnknownDevice
from krex.bench import cuda, groups, region, suite_cuda, summary, table
from krex.bench.commands import Command
from krex.bench.errors import BenchError, BenchUsageError
from krex.bench.measurement import Measurement
from krex.bench.policies import POLICIES
from krex.bench.results import Results
from krex.bench.settings import Settings
from krex.cli import main

GPU = "GPU-00112233-4455-6677-8899-aabbccddeeff"
BENCHES = Path(__file__).parents[1] / "benches"


@pytest.mark.parametrize("name", ["0", "15", GPU, GPU.replace("GPU", "MIG")])
def test_names_of_gpus(name: str) -> None:
    assert cuda.is_gpu(name)


@pytest.mark.parametrize(
    "name", ["cpu", "cpu:0", "", "gpu", "-1", "0,1", "\u0661", GPU[:-1], GPU + "0"]
)
def test_other_names(name: str) -> None:
    assert not cuda.is_gpu(name)


@pytest.fixture
def torch_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: find("json") if name in ("torch", "triton") else find(name),
    )


@pytest.mark.usefixtures("torch_is_there")
def test_one_command_per_kind_that_sees_one_gpu() -> None:
    commands = cuda.commands(GPU, 3)
    assert [it.kind for it in commands] == list(cuda.KINDS)
    for command in commands:
        assert command.argv[0] == sys.executable
        assert "krex.bench.suite_cuda" in command.argv[2]
        assert command.argv[3:] == (command.kind, "--device", GPU, "--correctness-work", "3")
        assert command.env["CUDA_VISIBLE_DEVICES"] == GPU
        # An index is nvidia-smi's, whose order this is.
        assert command.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@pytest.mark.usefixtures("torch_is_there")
@pytest.mark.parametrize("work", [0, -1, 10**9])
def test_senseless_amounts_of_work_are_refused(work: int) -> None:
    with pytest.raises(BenchUsageError, match="correctness-work"):
        cuda.commands(GPU, work)


def test_without_torch_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    with pytest.raises(BenchError, match="pip install torch"):
        cuda.commands(GPU)


@pytest.mark.parametrize(
    "options",
    [["--correctness-work", "5"], ["--device", GPU, "--correctness-work", "5", "--commands", "x"]],
)
def test_work_is_for_commands_of_our_own(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    assert "--correctness-work is for the built-in commands for a GPU" in capsys.readouterr().err


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "gpu"]) == 2
    assert "nvidia-smi" in capsys.readouterr().err


def test_the_marker_passes_the_device_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownDevice, match="no-such"), region("x", "no-such"):
        pass
    monkeypatch.setenv("KREX_BENCH_POLICY", "ungated")
    with region("x", device="no-such") as marked:
        pass
    assert marked.to_dict() == {}


# The commands


def test_the_source_is_python_with_a_name_of_its_own() -> None:
    tree = ast.parse(suite_cuda.SOURCE.replace("TOKEN", "1_2"))
    names = [it.name for it in tree.body if isinstance(it, ast.FunctionDef)]
    assert names == ["scale_1_2", "softmax_1_2", "rope_1_2"]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="gemm, elementwise"):
        suite_cuda.build("x", None, None)  # type: ignore[arg-type]


class Number(float):
    """As much of a tensor as the check needs."""

    def double(self) -> Number:
        return self

    def norm(self) -> float:
        return abs(self)

    def __sub__(self, other: object) -> Number:
        return Number(float(self) - float(other))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "error"), [([2, 2, 2], 0), ([2, 3, 2], 0.5), ([2, math.nan, 2], math.nan)]
)
def test_no_round_of_the_check_gets_lost(found: list[float], error: float) -> None:
    rounds = iter(found)
    case = suite_cuda.Case(
        launch=lambda: None,
        renew=lambda: None,
        found=lambda: Number(next(rounds)),
        expected=lambda: Number(2),
        tolerance=0.1,
    )
    assert suite_cuda.find_error(case, 3) == pytest.approx(error, nan_ok=True)


class FakeEvents:
    """A GPU on which each call takes as long as it says, in milliseconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls = 0
        self.cuda = self

    def Event(self, enable_timing: bool) -> Any:  # noqa: N802 - torch's name
        assert enable_timing
        device = self

        class Event:
            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at)

        return Event()

    def synchronize(self) -> None:
        pass

    def launch(self) -> None:
        self.calls += 1
        self.now += 0.25


def test_repeats_are_as_long_as_they_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite_cuda, "WARM_UP_S", 0.0)
    device = FakeEvents()
    assert suite_cuda.time_kernel(device, device.launch) == pytest.approx(0.25)
    assert device.calls == 5 + suite_cuda.REPEATS * suite_cuda.REPEAT_MS / 0.25


# The groups


def measurement(kind: str, policy: str, number: int, ms: float) -> Measurement:
    return Measurement(
        policy=policy,
        round=1 + number % 2,
        position=number,
        command=0,
        kind=kind,
        outcome="ok",
        detail="",
        ms=ms,
        verdict=None,
        reasons=(),
        started_at=0,
        ended_at=1,
        exit_status=0,
        signal=None,
    )


def results(device: str) -> Results:
    """Results in which `long` repeats well, and `short` does not."""
    settings = Settings(
        (Command(("x",), "long"), Command(("x",), "short")),
        (POLICIES["solo"], POLICIES["krex"]),
        device=device,
        rounds=1,
    )
    machine = {"cpu": "", "cores": 1, "virtual": False, "memory_gib": 1, "kernel": "", "python": ""}
    found = Results(settings, machine, "1")
    for number in range(8):
        found.measurements += [
            measurement("long", "solo", number, 0.2),
            measurement("short", "solo", number, 0.007 if number % 4 < 2 else 0.009),
            measurement("long", "krex", number, 0.2 if number else 0.22),
            measurement("short", "krex", number, 0.008),
        ]
    return found


def test_launch_bound_kernels_are_apart() -> None:
    data = results(GPU).to_dict()
    assert data["is_conclusive"], data["inconclusive_because"]
    shares = {
        (it["group"], it["policy"]): (it["kinds"], it["compared"], it["within_5pct"])
        for it in data["groups"]
    }
    assert shares == {
        ("over 20 us", "solo"): (["long"], 8, 1.0),
        ("over 20 us", "krex"): (["long"], 8, 0.875),
        ("launch-bound", "solo"): (["short"], 8, 0.0),
        ("launch-bound", "krex"): (["short"], 8, 1.0),
    }
    text = "\n".join(table.lines(data))
    assert "launch-bound: short, whose ceiling is what solo reaches" in text
    assert "87.5%" in text
    json.dumps(data, allow_nan=False)


def test_on_a_cpu_all_kinds_are_judged_alike() -> None:
    data = results("cpu").to_dict()
    assert data["groups"] == []
    assert any("short: solo itself" in it for it in data["inconclusive_because"])
    assert "launch-bound" not in "\n".join(table.lines(data))


def test_a_kind_without_a_reference_is_in_no_short_group() -> None:
    references = {"x": {"median_ms": None}, "y": {"median_ms": 0.02}, "z": {"median_ms": 0.021}}
    assert groups.launch_bound(references, GPU) == {"y"}
    assert summary.summarise([], Settings((), (POLICIES["solo"],), device=GPU), {}).doubts


# A whole run, on the simulated GPU


COMMAND = f"""
import json, sys
sys.path.insert(0, {str(BENCHES)!r})
from gpu import driver, kernels
from krex.bench import region
gpu = driver.Gpu(bytes=1 << 20)
clock = kernels.DriverClock(gpu)
clock.time(gpu.fill, 100)
with region("stream") as timed:
    ms = clock.time(gpu.fill, 20)
print(json.dumps({{"kind": "stream", "ms": ms, **timed.to_dict()}}))
"""


def test_a_run_on_a_gpu(tmp_path: Path) -> None:
    commands, file = tmp_path / "commands", tmp_path / "file.json"
    commands.write_text(json.dumps({"argv": [sys.executable, "-c", COMMAND]}) + "\n")
    with simgpu.device() as gpu:
        environment = os.environ | gpu.environment
        code = f"import sys; sys.path.insert(0, {str(BENCHES)!r}); from gpu import driver; "
        code += "print(driver.device_name())"
        device = subprocess.check_output(
            [sys.executable, "-c", code], env=environment, text=True
        ).strip()
        words = ["--device", device, "--commands", str(commands), "--export-json", str(file)]
        words += ["--policies", "ungated,krex", "--width", "4", "--rounds", "1", "--count", "8"]
        done = subprocess.run(
            [sys.executable, "-m", "krex", "bench", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
    assert done.returncode in (0, 3), done.stderr
    data = json.loads(file.read_text())
    krex = next(it for it in data["policies"] if it["policy"] == "krex")
    assert (krex["usable"], krex["regions"]) == (8, 8), done.stdout
    assert set(krex["verdicts"]) <= {"clean", "unknown"}
    assert {it["group"] for it in data["groups"]} == {"over 20 us"}
    assert "over 20 us: stream" in done.stdout
