"""The region: the part of an evaluation command that has the device and its cores alone.

>>> import krex.region as region
>>> with region.critical() as timed:
...     run_the_timed_loop()
>>> timed.report.verdict
'clean'
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from krex._krex import Critical, Report, Sibling
from krex.errors import RegionError, RegionRevoked, RegionTimeout

__all__ = [
    "RegionError",
    "RegionRevoked",
    "RegionTimeout",
    "Report",
    "Sibling",
    "critical",
    "on_region_entered",
    "on_region_exited",
    "remove_callback",
]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_EnteredCallback = TypeVar("_EnteredCallback", bound="Callable[[critical], Any]")
_ExitedCallback = TypeVar("_ExitedCallback", bound="Callable[[Report], Any]")

_entered_callbacks: list[Callable[[critical], Any]] = []
_exited_callbacks: list[Callable[[Report], Any]] = []

# Bits of a code object's `co_flags`: generator, coroutine, asynchronous generator. A call of such
# a function returns before its body runs, so that a region around the call would hold nothing.
_DEFERRED = 0x20 | 0x80 | 0x200


class critical(Critical):  # noqa: N801 - it is used like a function
    """Alone on a device: a context manager and a decorator.

    While the block runs, the siblings (all other tenants that share the device) are turned back
    at their next submission, drained, and frozen. Warm-up belongs inside. Re-entrant in its
    thread; other threads of the process queue. In a process that descends from a holder it joins
    the holder's region. Do not await other tasks inside: all tasks of a thread share its region.

    Args:
        device: ``"cpu"``, or ``"cpu:NAME"`` for a group of commands of its own; or a GPU: its
            index as nvidia-smi counts (``0`` or ``"0"``, whatever CUDA_VISIBLE_DEVICES says), its
            UUID, or as much of that as no other has. None: what ``krex run --device`` said, else
            the GPU on which this process has a context, else ``"cpu"``.
        timeout: longest wait for the turn, in seconds. None: no limit. What siblings have in
            flight when the turn comes is bounded by `drain_timeout` instead.
        max_hold: longest time inside, in seconds; past it the region is revoked.
        drain_timeout: longest wait for what siblings have in flight, in seconds; past it the
            verdict says ``contended``.
        priority: -128 to 127; a higher one is served first. Ten seconds of waiting count as much
            as one level.
        label: a word for `krex status` and the report.

    After the block `report` holds what happened; before its end it raises RegionError. `epoch` is
    the number of the region, which only grows per device.

    Raises:
        RegionTimeout: at entry, when `timeout` has passed. It is a TimeoutError.
        RegionRevoked: at the end of the block, if the region was taken away meanwhile (past
            `max_hold`, or stalled while others waited). The block's own exception comes first.
        RegionError: for a region on another device inside a region.
        UnknownDevice: at entry. It is a ValueError.
        KrexError: at entry, if it takes NVIDIA's management library to tell which GPU is meant,
            and that is not there or fails.
        ValueError: for times that are not positive and finite, a priority out of range, or a
            `KREX_RESERVED_CPUS` that cannot be used or differs from that of other commands.
        SegmentError: if nobody could be excluded, since the shared segment cannot be used.
    """

    __slots__ = ()

    def __call__(self, function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        """Decorate `function`: each call runs in a region of its own.

        Its report goes to the callbacks of `on_region_exited`.

        Raises:
            TypeError: for generators and coroutine functions, whose body runs after the call.
        """
        code = getattr(function, "__code__", None)
        if code is not None and code.co_flags & _DEFERRED:
            raise TypeError(
                f"{function!r} is a generator or coroutine function, whose body runs after the "
                "call: use `with krex.region.critical():` inside it"
            )

        @functools.wraps(function)
        def wrapper(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            with critical(
                self.device,
                timeout=self.timeout,
                max_hold=self.max_hold,
                drain_timeout=self.drain_timeout,
                priority=self.priority,
                label=self.label,
            ):
                return function(*args, **kwargs)

        return wrapper


def on_region_entered(callback: _EnteredCallback) -> _EnteredCallback:
    """Call `callback` with the `critical` object whenever a region of this process was entered.

    It runs inside the region, so it should be quick. What it raises leaves the region. Usable as
    a decorator; `remove_callback` ends it.
    """
    _entered_callbacks.append(callback)
    return callback


def on_region_exited(callback: _ExitedCallback) -> _ExitedCallback:
    """Call `callback` with the report whenever a region of this process has ended.

    The gate is open by then. Usable as a decorator; `remove_callback` ends it.
    """
    _exited_callbacks.append(callback)
    return callback


def remove_callback(callback: Callable[..., Any]) -> None:
    """Stop calling `callback`.

    Raises:
        ValueError: if it was not registered.
    """
    found = False
    for callbacks in (_entered_callbacks, _exited_callbacks):
        while callback in callbacks:
            callbacks.remove(callback)
            found = True
    if not found:
        raise ValueError(f"{callback!r} is not registered")
