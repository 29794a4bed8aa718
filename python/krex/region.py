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
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from krex._krex import Region, Report, Sibling, enter
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


class critical:  # noqa: N801 - it is used like a function
    """Alone on a device: a context manager and a decorator.

    While the block runs, the siblings (all other tenants that share the device) are turned back
    at their next submission, drained, and frozen. Warm-up belongs inside. Re-entrant in its
    thread; other threads of the process queue. In a process that descends from a holder it joins
    the holder's region. Do not await other tasks inside: all tasks of a thread share its region.

    Args:
        device: ``"cpu"``, or ``"cpu:NAME"`` for a group of commands of its own. None: what
            ``krex run --device`` said, else ``"cpu"``.
        timeout: longest wait for the turn, in seconds. None: no limit. What siblings have in
            flight when the turn comes is bounded by `drain_timeout` instead.
        max_hold: longest time inside, in seconds; past it the region is revoked.
        drain_timeout: longest wait for what siblings have in flight, in seconds; past it the
            verdict says ``contended``.
        priority: -128 to 127; a higher one is served first.
        label: a word for `krex status` and the report.

    Raises:
        RegionTimeout: at entry, when `timeout` has passed. It is a TimeoutError.
        RegionRevoked: at the end of the block, if the region was taken away meanwhile (past
            `max_hold`, or stalled while others waited). The block's own exception comes first.
        RegionError: for a region on another device inside a region.
        UnknownDevice: at entry. It is a ValueError.
        ValueError: for times that are not positive and finite, or a priority out of range.
        SegmentError: if nobody could be excluded, since the shared segment cannot be used.
    """

    __slots__ = (
        "_regions",
        "_report",
        "device",
        "drain_timeout",
        "label",
        "max_hold",
        "priority",
        "timeout",
    )

    def __init__(
        self,
        device: str | None = None,
        *,
        timeout: float | None = None,
        max_hold: float = 60.0,
        drain_timeout: float = 0.5,
        priority: int = 0,
        label: str | None = None,
    ) -> None:
        self.device = device
        self.timeout = timeout
        self.max_hold = max_hold
        self.drain_timeout = drain_timeout
        self.priority = priority
        self.label = label
        self._regions: list[Region] = []
        self._report: Report | None = None

    def __enter__(self) -> critical:
        region = enter(
            self.device,
            self.timeout,
            self.max_hold,
            self.drain_timeout,
            self.priority,
            self.label,
        )
        self._regions.append(region)
        if _entered_callbacks:
            try:
                for callback in tuple(_entered_callbacks):
                    callback(self)
            except BaseException:
                self._leave()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        report = self._leave()
        if report is None:
            return
        for callback in tuple(_exited_callbacks):
            callback(report)
        if report.verdict == "revoked" and error is None:
            revoked = RegionRevoked(report.reasons[0])
            revoked.report = report
            raise revoked

    def _leave(self) -> Report | None:
        if not self._regions:
            raise RegionError("the region was not entered")
        # None in a forked child: the region is its parent's, and stays so.
        report = self._regions.pop().leave()
        if report is not None:
            self._report = report
        return report

    @property
    def report(self) -> Report:
        """What happened in the region that ended last.

        Raises:
            RegionError: before the end of the first one.
        """
        if self._report is None:
            raise RegionError("the report exists once the region has ended: read it after the block")
        return self._report

    @property
    def epoch(self) -> int:
        """The number of the region that this is in, or was in last; it only grows per device.

        Raises:
            RegionError: before the first one is entered.
        """
        return self._regions[-1].epoch if self._regions else self.report.epoch

    def __call__(
        self, function: Callable[_Parameters, _Result]
    ) -> Callable[_Parameters, _Result]:
        """Decorate `function`: each call runs in a region of its own.

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
