"""The built-in commands of ``krex bench`` for a GPU, and how it is named."""

from __future__ import annotations

import importlib.util
import re
import sys

from krex.bench.commands import Command, own_program
from krex.bench.errors import BenchError, BenchUsageError

#: The kinds of commands; `krex.bench.suite_cuda` has what they do.
KINDS = ("gemm", "elementwise", "softmax", "rope", "convolution", "attention")
#: Rounds of comparing a kernel with its reference, before anything is timed.
DEFAULT_WORK = 10
_MOST_WORK = 100_000

_UUID = r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def is_gpu(device: str) -> bool:
    """Return whether a device is a GPU: an index of nvidia-smi's, or a UUID as it prints it."""
    return re.fullmatch(rf"[0-9]{{1,4}}|{_UUID}", device) is not None


def commands(device: str, work: int | None = None) -> list[Command]:
    """Return one command per kind; each sees only this GPU.

    Args:
        device: as `is_gpu` has it.
        work: rounds of the correctness check, so many times a few milliseconds of the GPU.

    Raises:
        BenchUsageError: for a number of rounds that makes no sense.
        BenchError: if torch, which they use, is missing. Triton is used if it is there.
    """
    work = DEFAULT_WORK if work is None else work
    if not 1 <= work <= _MOST_WORK:
        raise BenchUsageError(f"--correctness-work is a number from 1 to {_MOST_WORK}")
    if importlib.util.find_spec("torch") is None:
        raise BenchError(
            "the built-in commands for a GPU need torch (and use Triton if it is there); "
            f"get it with: {sys.executable} -m pip install torch; "
            "or name commands of your own: --commands FILE"
        )
    environment = {
        "CUDA_VISIBLE_DEVICES": device,
        # Indices are nvidia-smi's, which counts in this order.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    words = ("--device", device, "--correctness-work", str(work))
    return [
        Command(own_program("krex.bench.suite_cuda", kind, *words), kind, environment)
        for kind in KINDS
    ]
