"""Kernels that a holder times, each as a function that launches it once, and how to time them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from gpu import driver

#: With torch; all take over 20 us on any GPU that these sizes fit on.
TORCH_KERNELS = ("gemm", "elementwise", "softmax")
#: Without: bound by memory, and by nothing but time.
DRIVER_KERNELS = ("stream", "spin")


class Clock(Protocol):
    """Times launches with the device's own events."""

    def time(self, launch: Callable[[], object], count: int) -> float:
        """Return the milliseconds per launch of `count` launches in a row."""

    def synchronize(self) -> None:
        """Wait for what was launched."""


def warm_up(clock: Clock, launch: Callable[[], object], seconds: float) -> None:
    """Launch for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(5):
            launch()
        clock.synchronize()


class DriverClock:
    """Events of the driver's own."""

    def __init__(self, gpu: driver.Gpu) -> None:
        self._gpu = gpu
        self._events = gpu.event(), gpu.event()

    def time(self, launch: Callable[[], object], count: int) -> float:
        """Return the milliseconds per launch of `count` launches in a row."""
        start, end = self._events
        self._gpu.record(start)
        for _ in range(count):
            launch()
        self._gpu.record(end)
        self._gpu.synchronize()
        return self._gpu.elapsed_ms(start, end) / count

    def synchronize(self) -> None:
        """Wait for what was launched."""
        self._gpu.synchronize()


class TorchClock:
    """Events of torch."""

    def __init__(self) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def time(self, launch: Callable[[], object], count: int) -> float:
        """Return the milliseconds per launch of `count` launches in a row."""
        start, end = self._events
        start.record()
        for _ in range(count):
            launch()
        end.record()
        self._cuda.synchronize()
        return float(start.elapsed_time(end)) / count

    def synchronize(self) -> None:
        """Wait for what was launched."""
        self._cuda.synchronize()


def with_driver() -> tuple[Clock, dict[str, Callable[[], object]]]:
    """Return the clock and the kernels that need no torch."""
    gpu = driver.Gpu()
    return DriverClock(gpu), {"stream": gpu.fill, "spin": lambda: gpu.spin(200_000)}


def with_torch() -> tuple[Clock, dict[str, Callable[[], object]]]:
    """Return the clock and the kernels of torch."""
    import torch

    make: Any = torch.randn
    left = make(4096, 4096, device="cuda", dtype=torch.bfloat16)
    right = make(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(left)
    # 256 MB each: float32.
    vector = make(64 << 20, device="cuda")
    doubled = torch.empty_like(vector)
    rows = make(8192, 8192, device="cuda")
    kernels: dict[str, Callable[[], object]] = {
        "gemm": lambda: torch.matmul(left, right, out=product),
        "elementwise": lambda: torch.mul(vector, 2.0, out=doubled),
        "softmax": lambda: torch.softmax(rows, 1),
    }
    for launch in kernels.values():
        launch()
    torch.cuda.synchronize()
    return TorchClock(), kernels
