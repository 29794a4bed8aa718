"""`region`: marks the part of an evaluation command that its policy may protect.

``krex bench`` says by ``KREX_BENCH_POLICY`` which policy a command runs under:

========================== =========================================================
``krex``, or not set       `krex.region.critical()`
``region-lock``            an exclusive flock on the file that ``KREX_BENCH_LOCK`` names
anything else              nothing
========================== =========================================================

Nothing but `region` looks at these variables: `krex.region.critical()` itself is never switched
off.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

# Under every policy, though only one needs it, and before the region: what was imported and made
# before a timed loop decides where its objects lie, which alone can change a Python loop's timing
# by 20%. Nothing is started by it, and no shared memory is looked at.
from krex.region import critical

POLICY_VARIABLE = "KREX_BENCH_POLICY"
LOCK_VARIABLE = "KREX_BENCH_LOCK"


class region:  # noqa: N801 - it is used like a function
    """The region of an evaluation command: a context manager.

    Outside of ``krex bench`` it is `krex.region.critical(device, label=label)`, so a command that
    uses it needs no second version for its daily work.

    Args:
        label: a word for `krex status` and the report.
        device: as for `krex.region.critical()`.

    Raises:
        RuntimeError: at entry, under the policy ``region-lock`` without ``KREX_BENCH_LOCK``.
    """

    def __init__(self, label: str | None = None, device: str | None = None) -> None:
        self._critical = critical(device, label=label)
        self._is_entered = False
        self._lock: int | None = None

    def __enter__(self) -> region:
        policy = os.environ.get(POLICY_VARIABLE) or "krex"
        if policy == "krex":
            self._critical.__enter__()
            self._is_entered = True
        elif policy == "region-lock":
            self._lock = _take_lock()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_entered:
            self._critical.__exit__(kind, error, traceback)
        if self._lock is not None:
            import fcntl

            # Closing alone would leave it to a child that was forked in the region.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def to_dict(self) -> dict[str, Any]:
        """What the command adds to its line of JSON: `verdict` and `reasons` if there are any."""
        if not self._is_entered:
            return {}
        report = self._critical.report
        return {"verdict": report.verdict, "reasons": list(report.reasons)}


def _take_lock() -> int:
    import fcntl

    path = os.environ.get(LOCK_VARIABLE)
    if not path:
        raise RuntimeError(f"{POLICY_VARIABLE}=region-lock needs a file named by {LOCK_VARIABLE}")
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # By this the bench knows how many commands took part.
        os.write(descriptor, b"1")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
