"""Programs that reach the driver in every known way run unchanged, and krex counts all they do."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import simgpu
from gpu.crew import expect, read_line
from gpu_stage import IS_REAL, Gpu
from harness import LIMIT, wait_until

pytestmark = [pytest.mark.timeout(300)] + ([pytest.mark.gpu] if IS_REAL else [])

CLIENTS = Path(__file__).parents[1] / "clients"


def driver_library() -> str:
    """The driver's file, to link with."""
    if not IS_REAL:
        return str(simgpu.LIBRARY)
    done = subprocess.run(["ldconfig", "-p"], check=True, text=True, capture_output=True)
    places = [it.split(" => ")[1] for it in done.stdout.splitlines() if "libcuda.so.1 " in it]
    for directory in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        places.append(os.path.join(directory, "libcuda.so.1"))
    places += glob.glob("/usr/local/nvidia/lib*/libcuda.so.1")
    found = [it for it in places if os.path.exists(it)]
    if not found:
        pytest.skip("libcuda.so.1 is nowhere to be linked with")
    return found[0]


def nvcc() -> str:
    """NVIDIA's compiler: NVCC, on the PATH, or of a Python package."""
    patterns = [f"{it}/nvidia/*/bin/nvcc" for it in sys.path] + ["/usr/local/cuda*/bin/nvcc"]
    found = [os.environ.get("NVCC") or shutil.which("nvcc") or ""]
    found += [it for pattern in patterns for it in glob.glob(pattern)]
    if not any(found):
        pytest.skip("there is no nvcc")
    return next(it for it in found if it)


def build(command: list[str | Path]) -> None:
    done = subprocess.run(command, check=False, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def c_program(*options: str) -> Callable[[Path], list[str]]:
    def make(directory: Path) -> list[str]:
        program, source = directory / "client", CLIENTS / "03_driver.c"
        libraries = ["-ldl"] if options else [driver_library()]
        build(["cc", "-Wall", "-Werror", *options, "-o", program, source, *libraries])
        return [str(program)]

    return make


def cuda_program(*options: str) -> Callable[[Path], list[str]]:
    def make(directory: Path) -> list[str]:
        compiler = nvcc()
        program = directory / "client"
        words: list[str | Path] = [compiler, architecture(), *options, "-o", program]
        root = Path(compiler).resolve().parents[1]
        places = [root / "lib64", root / "lib", root / "targets" / "x86_64-linux" / "lib"]
        words += [f"-L{it}" for it in places if it.is_dir()]
        if "shared" in options:
            words += shared_runtime(places, directory)
        build([*words, CLIENTS / "04_runtime.cu"])
        return [str(program)]

    return make


def architecture() -> str:
    """nvcc's option for the first GPU."""
    question = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(question, check=True, text=True, capture_output=True)
    return f"-arch=sm_{done.stdout.splitlines()[0].strip().replace('.', '')}"


def shared_runtime(places: list[Path], directory: Path) -> list[str]:
    """Where the shared runtime is: packages have it without the name that linkers look for."""
    for found in (it for place in places for it in sorted(place.glob("libcudart.so*"))):
        link = directory / "libcudart.so"
        link.symlink_to(found)
        return [f"-L{directory}", "-Xlinker", f"-rpath={found.parent}"]
    return []


def python_program(name: str, needs: str = "") -> Callable[[Path], list[str]]:
    def make(_: Path) -> list[str]:
        for module in needs.split():
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"there is no {module}")
        return [sys.executable, str(CLIENTS / name)]

    return make


@dataclass(frozen=True)
class Client:
    make: Callable[[Path], list[str]]
    environment: tuple[tuple[str, str], ...] = ()


ANYWHERE = {
    "bindings": Client(python_program("01_bindings.py")),
    "bindings-per-thread": Client(
        python_program("01_bindings.py"), (("CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM", "1"),)
    ),
    "ctypes": Client(python_program("02_ctypes.py")),
    "linked": Client(c_program()),
    "loaded": Client(c_program("-DLOADED")),
    "fork": Client(python_program("10_fork.py")),
    "threads": Client(python_program("11_threads.py")),
}
REAL_ONLY = {
    "runtime-static": Client(cuda_program()),
    "runtime-shared": Client(cuda_program("-cudart", "shared")),
    "runtime-per-thread": Client(cuda_program("--default-stream", "per-thread")),
    "torch-graph": Client(python_program("05_torch_graph.py", "torch")),
    "triton": Client(python_program("07_triton_launch.py", "triton")),
    "cupy": Client(python_program("08_cupy_sum.py", "cupy")),
    "jax": Client(python_program("09_jax_sum.py", "jax")),
}
CHOSEN = ANYWHERE | REAL_ONLY if IS_REAL else ANYWHERE


def submitters(gpu: Gpu) -> list[dict[str, Any]]:
    return [it for tenant in gpu.machine.status()["tenants"] for it in tenant["submitters"]]


def start(gpu: Gpu, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
    words = [*gpu.crew.launcher("client"), *command]
    process = gpu.start(words, env=gpu.environment | environment, stderr=subprocess.PIPE)
    try:
        expect(process, "ready")
    except RuntimeError as error:
        process.kill()
        raise AssertionError(f"{error}: {process.communicate()[1].decode()[-2000:]}") from None
    return process


def proceed(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def finish(process: subprocess.Popen[bytes]) -> None:
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (0, b""), err.decode()[-2000:]


@pytest.mark.parametrize("name", CHOSEN)
def test_submissions_are_counted(gpu: Gpu, tmp_path: Path, name: str) -> None:
    client = CHOSEN[name]
    command = client.make(tmp_path)
    process = start(gpu, command, **dict(client.environment))
    # Its helper comes up by itself, after the context is made.
    wait_until(lambda: all(it["drains"] for it in submitters(gpu)), "it can be drained")
    before = submitters(gpu)
    assert len(before) == 1
    assert before[0]["device"] == gpu.device
    assert before[0]["births"] > 0
    assert before[0]["fully_gated"]
    proceed(process)
    words = read_line(process).split()
    assert words[0] == "submitted"
    after = submitters(gpu)
    counted = after[0]["submissions"] - before[0]["submissions"]
    if words[1:3] == ["at", "least"]:
        assert counted >= int(words[3])
    else:
        assert counted == int(words[1])
    assert (after[0]["in_flight"], after[0]["fully_gated"]) == (0, True)
    finish(process)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_client_waits_for_a_region_and_then_succeeds(gpu: Gpu, tmp_path: Path, name: str) -> None:
    """Its submissions while the region lasts would be in the report."""
    client = CHOSEN[name]
    command = client.make(tmp_path)
    holder = gpu.crew.holder("driver")
    process = start(gpu, command, **dict(client.environment))
    proceed(process)
    for _ in range(3):
        for found in holder.measure("spin", 3, launches=5):
            assert set(found["submissions"]) <= {0}
            assert found["verdict"] == "clean", found["reasons"]
    assert read_line(process).startswith("submitted")
    finish(process)
