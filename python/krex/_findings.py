"""What a check of ``krex doctor`` looks at, and what it returns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from krex import _cgroups, _procfs
from krex._text import one_line

Level = Literal["ok", "info", "warning", "error"]

_SHOWN = 8


@dataclass(frozen=True)
class Finding:
    """One result of a check."""

    id: str
    """Which check it is from; stable, for scripts."""
    level: Level
    message: str
    """One sentence."""
    remedy: str | None = None
    """The exact command that mends it, or None."""


@dataclass
class Machine:
    """What the checks look at, each part looked up once."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @cached_property
    def runtime_dir(self) -> str:
        """The runtime directory that krex uses in this environment."""
        given = self.environ.get("KREX_RUNTIME_DIR") or default_runtime_dir()
        return os.path.join(os.getcwd(), given)

    @property
    def segment(self) -> str:
        """The path of the segment, whether or not there is one."""
        return os.path.join(self.runtime_dir, "segment")

    @cached_property
    def mounts(self) -> list[_procfs.Mount]:
        """The mount table."""
        return _procfs.mounts()

    @cached_property
    def cgroup_error(self) -> Exception | None:
        """Why no cgroup can be made below the caller's own, or None if it can; really tried."""
        try:
            _cgroups.try_child(_cgroups.own_directory(self.mounts))
        except (_cgroups.NoCgroupError, OSError) as error:
            return error
        return None


def default_runtime_dir() -> str:
    """Return the runtime directory of this user, where the environment names none."""
    return f"/dev/shm/krex-{os.geteuid()}"


def some(items: Sequence[object]) -> str:
    """Return the first few items as text, and how many more there are."""
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    rest = len(items) - _SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def reason(error: OSError) -> str:
    """Return what was refused, and where, as one safe line."""
    where = f": {one_line(os.fsdecode(error.filename))}" if error.filename else ""
    return f"{error.strerror}{where}"
