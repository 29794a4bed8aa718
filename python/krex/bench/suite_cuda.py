"""The built-in evaluation commands for a GPU, one per kind of kernel.

Each is a whole one, as an AI coding agent would start it: it imports torch, builds, compiles Triton
source that nobody has compiled before, checks its kernel against a reference of higher precision
with fresh inputs, warms it up and times it with the GPU's own events:

gemm         a product of two bfloat16 matrices (cuBLAS), scaled by a Triton kernel
elementwise  256 MB of float32 scaled by a Triton kernel: bound by memory
softmax      8192 rows of 8192 float32, by a Triton kernel: bound by memory
rope         rotary embeddings of a few small tensors, one launch after the other: bound by
             launching; its `ms` is per launch
convolution  3 x 3, float16 (cuDNN), scaled by a Triton kernel
attention    bfloat16, of 2048 positions, scaled by a Triton kernel

Without Triton, torch does its part, and nothing is compiled.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from krex.bench.cuda import DEFAULT_WORK, KINDS
from krex.bench.marker import LOCK_VARIABLE, region

# As in `krex.bench.suite`; the clocks of a GPU take longer to rise.
REPEATS = 11
REPEAT_MS = 8.0
WARM_UP_S = 0.05

SCALE = 0.5

SOURCE = """\
import triton
import triton.language as tl


@triton.jit
def scale_TOKEN(x, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside) * factor, mask=inside)


@triton.jit
def softmax_TOKEN(x, out, columns, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < columns
    start = tl.program_id(0) * columns
    value = tl.load(x + start + at, mask=inside, other=-float("inf"))
    value = tl.exp(value - tl.max(value, axis=0))
    tl.store(out + start + at, value / tl.sum(value, axis=0), mask=inside)


@triton.jit
def rope_TOKEN(x, cos, sin, out, HALF: tl.constexpr):
    at = tl.arange(0, HALF)
    start = tl.program_id(0) * 2 * HALF
    one = tl.load(x + start + at)
    two = tl.load(x + start + HALF + at)
    c = tl.load(cos + at)
    s = tl.load(sin + at)
    tl.store(out + start + at, one * c - two * s)
    tl.store(out + start + HALF + at, two * c + one * s)
"""

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A kernel, and how it is checked."""

    launch: Call
    #: Draws new inputs.
    renew: Call
    #: What the kernel wrote, after `launch`.
    found: Call
    #: What it should have been, in higher precision.
    expected: Call
    #: Largest error, relative to the norm of what is expected.
    tolerance: float
    #: Launches in one call, by which its time is divided.
    launches: int = 1


@dataclass(frozen=True)
class Kernels:
    """What Triton does where it is, and torch elsewhere; each writes to its last argument."""

    scale: Callable[[Any, Any], Any]
    softmax: Callable[[Any, Any], Any]
    rope: Callable[[Any, Any, Any, Any], Any]


@contextmanager
def kernels(torch: Any) -> Iterator[Kernels]:
    """Compile, at their first call, kernels that are nobody else's; the source goes at the end."""
    if importlib.util.find_spec("triton") is None:
        yield _of_torch(torch)
        return
    # What is compiled here is of no use to anybody later: it goes with the bench's directory.
    if lock := os.environ.get(LOCK_VARIABLE):
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(lock).with_name("triton")))
    token = f"{os.getpid()}_{time.time_ns()}"
    with tempfile.TemporaryDirectory(prefix="krex-bench-") as directory:
        # Triton reads the source of its functions from their file.
        path = Path(directory) / f"kernels_{token}.py"
        path.write_text(SOURCE.replace("TOKEN", token), encoding="utf-8")
        specification = importlib.util.spec_from_file_location(path.stem, path)
        assert specification is not None
        assert specification.loader is not None
        module = importlib.util.module_from_spec(specification)
        sys.modules[path.stem] = module
        specification.loader.exec_module(module)
        yield _of_triton(module, token)


def _of_triton(module: Any, token: str) -> Kernels:
    scale, softmax, rope = (getattr(module, f"{it}_{token}") for it in ("scale", "softmax", "rope"))

    def run_scale(x: Any, out: Any) -> None:
        n = x.numel()
        scale[(-(-n // 1024),)](x, out, n, SCALE, BLOCK=1024)

    def run_softmax(x: Any, out: Any) -> None:
        rows, columns = x.shape
        softmax[(rows,)](x, out, columns, BLOCK=columns, num_warps=8)

    def run_rope(x: Any, cos: Any, sin: Any, out: Any) -> None:
        rows, width = x.shape
        rope[(rows,)](x, cos, sin, out, HALF=width // 2)

    return Kernels(run_scale, run_softmax, run_rope)


def _of_torch(torch: Any) -> Kernels:
    def rope(x: Any, cos: Any, sin: Any, out: Any) -> None:
        one, two = x.chunk(2, -1)
        torch.cat((one * cos - two * sin, two * cos + one * sin), -1, out=out)

    return Kernels(
        lambda x, out: torch.mul(x, SCALE, out=out),
        lambda x, out: out.copy_(torch.softmax(x, 1)),
        rope,
    )


def build(kind: str, torch: Any, own: Kernels) -> Case:
    """Return the kernel of a kind, with memory for its inputs and results.

    Raises:
        ValueError: for an unknown kind.
    """
    builders = {
        "gemm": _gemm,
        "elementwise": _elementwise,
        "softmax": _softmax,
        "rope": _rope,
        "convolution": _convolution,
        "attention": _attention,
    }
    if kind not in builders:
        raise ValueError(f"unknown kind {kind!r}; there are {', '.join(builders)}")
    return builders[kind](torch, own)


def _normal(*tensors: Any) -> Call:
    def renew() -> None:
        for it in tensors:
            it.normal_()

    return renew


def _scaled(own: Kernels, out: Any, work: Call) -> Call:
    def launch() -> None:
        own.scale(work(), out)

    return launch


def _gemm(torch: Any, own: Kernels) -> Case:
    left, right, product, out = (
        torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    return Case(
        _scaled(own, out, lambda: torch.matmul(left, right, out=product)),
        _normal(left, right),
        lambda: out,
        lambda: (left.float() @ right.float()) * SCALE,
        2e-2,
    )


def _elementwise(torch: Any, own: Kernels) -> Case:
    x, out = (torch.empty(64 << 20, device="cuda") for _ in range(2))
    return Case(
        lambda: own.scale(x, out), _normal(x), lambda: out, lambda: x.double() * SCALE, 1e-5
    )


def _softmax(torch: Any, own: Kernels) -> Case:
    x, out = (torch.empty(8192, 8192, device="cuda") for _ in range(2))
    return Case(
        lambda: own.softmax(x, out),
        _normal(x),
        lambda: out,
        lambda: torch.softmax(x.double(), 1),
        1e-4,
    )


def _rope(torch: Any, own: Kernels) -> Case:
    heads, half = 32, 64
    query, key, turned, out = (torch.empty(heads, 2 * half, device="cuda") for _ in range(4))
    cos, sin = (torch.empty(half, device="cuda") for _ in range(2))
    both_cos, both_sin = (torch.empty(2 * half, device="cuda") for _ in range(2))
    draw = _normal(query, key)

    def renew() -> None:
        draw()
        angle = torch.rand(half, device="cuda") * 6.0
        torch.cos(angle, out=cos)
        torch.sin(angle, out=sin)
        torch.cat((cos, cos), out=both_cos)
        torch.cat((-sin, sin), out=both_sin)

    def launch() -> None:
        own.rope(query, cos, sin, turned)
        torch.mul(key, both_cos, out=out)
        out.addcmul_(key.roll(half, -1), both_sin)

    def turn(x: Any) -> Any:
        one, two = x.double().chunk(2, -1)
        c, s = cos.double(), sin.double()
        return torch.cat((one * c - two * s, two * c + one * s), -1)

    return Case(
        launch,
        renew,
        lambda: torch.stack((turned, out)),
        lambda: torch.stack((turn(query), turn(key))),
        1e-5,
        # The turned query, and a product, a copy and a sum for the key.
        launches=4,
    )


def _convolution(torch: Any, own: Kernels) -> Case:
    options = {"device": "cuda", "dtype": torch.float16}
    x = torch.empty(32, 128, 56, 56, **options).contiguous(memory_format=torch.channels_last)
    weight = torch.empty(128, 128, 3, 3, **options).contiguous(memory_format=torch.channels_last)
    out = torch.empty(32, 128, 56, 56, **options).contiguous(memory_format=torch.channels_last)
    convolve = torch.nn.functional.conv2d
    return Case(
        # Both have the same strides, so their memory is scaled in its own order.
        _scaled(own, out, lambda: convolve(x, weight, padding=1)),
        _normal(x, weight),
        lambda: out,
        lambda: convolve(x.float(), weight.float(), padding=1) * SCALE,
        2e-2,
    )


def _attention(torch: Any, own: Kernels) -> Case:
    shape = (4, 16, 2048, 128)
    query, key, value, out = (
        torch.empty(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    attend = torch.nn.functional.scaled_dot_product_attention

    def expected() -> Any:
        parts = []
        # One at a time: all scores at once are a gigabyte.
        for q, k, v in zip(query.float(), key.float(), value.float(), strict=True):
            shares = torch.softmax((q @ k.transpose(-1, -2)) * shape[-1] ** -0.5, -1)
            parts.append((shares @ v) * SCALE)
        return torch.stack(parts)

    return Case(
        _scaled(own, out, lambda: attend(query, key, value).contiguous()),
        _normal(query, key, value),
        lambda: out,
        expected,
        2e-2,
    )


def find_error(case: Case, rounds: int) -> float:
    """Return the largest error of so many rounds with fresh inputs, relative to the norm."""
    errors = []
    for _ in range(rounds):
        case.renew()
        case.launch()
        found, expected = case.found().double(), case.expected().double()
        errors.append(float((found - expected).norm() / expected.norm()))
    # NaN, which compares with nothing, must not get lost.
    return math.nan if any(math.isnan(it) for it in errors) else max(errors)


def time_kernel(torch: Any, launch: Call) -> float:
    """Return milliseconds per call: the median of the repeats, after a warm-up."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time_calls(calls: int) -> float:
        start.record()
        for _ in range(calls):
            launch()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / calls

    deadline = time.perf_counter() + WARM_UP_S
    one = time_calls(5)
    while time.perf_counter() < deadline:
        # The fastest, so that a pause in the warm-up does not shorten the repeats.
        one = min(one, time_calls(5))
    calls = max(1, round(REPEAT_MS / one))
    return statistics.median(time_calls(calls) for _ in range(REPEATS))


def main() -> None:
    """Be the evaluation command of the kind that the command line names."""
    parser = argparse.ArgumentParser(prog="krex.bench.suite_cuda")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--device", help="krex's name of the GPU (default: what krex run said)")
    parser.add_argument("--correctness-work", type=int, default=DEFAULT_WORK, metavar="ROUNDS")
    arguments = parser.parse_args()
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")
    torch.manual_seed(1)
    with kernels(torch) as own, torch.inference_mode():
        case = build(arguments.kind, torch, own)
        error = find_error(case, arguments.correctness_work)
        if not error < case.tolerance:
            sys.exit(f"the {arguments.kind} kernel is wrong: relative error {error:.3g}")
        torch.cuda.synchronize()
        gc.disable()  # nothing but the kernel in the timed loop
        with region(arguments.kind, arguments.device) as timed:
            ms = time_kernel(torch, case.launch) / case.launches
    print(json.dumps({"kind": arguments.kind, "ms": ms, **timed.to_dict()}))
