"""Saying what a command is doing, for `krex status`."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

from krex._krex import set_activity

__all__ = ["phase"]


class phase:  # noqa: N801 - it is used like a function
    """Say what this command is doing now: ``idle``, ``compiling`` or ``warming_up``.

    A call is enough; as a context manager it says what was said before at the block's end.

    >>> phase("compiling")
    >>> with phase("warming_up"):
    ...     pass

    Raises:
        ValueError: for another word.
        SegmentError: if the runtime directory cannot be used.
    """

    __slots__ = ("_before", "name")

    def __init__(self, name: Literal["idle", "compiling", "warming_up"]) -> None:
        self.name = name
        self._before = set_activity(name)

    def __enter__(self) -> phase:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        set_activity(self._before)

    def __repr__(self) -> str:
        return f"phase({self.name!r})"
