"""The ways in which commands share the machine that are compared."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from krex.bench.errors import BenchUsageError


@dataclass(frozen=True)
class Policy:
    """A way to run commands beside each other."""

    name: str
    summary: str
    #: One command at a time, whatever the width.
    is_serial: bool = False
    #: Whether regions that the commands mark can be counted.
    counts_regions: bool = False


SOLO = Policy("solo", "one command at a time: the reference", is_serial=True)
UNGATED = Policy("ungated", "all at once, nothing between them")
EXCLUSIVE = Policy("exclusive", "all at once, a file lock around each whole command")
REGION_LOCK = Policy("region-lock", "all at once, a file lock around each region", False, True)
KREX = Policy("krex", "all at once under `krex run`, regions by krex", False, True)

POLICIES = {it.name: it for it in (SOLO, UNGATED, EXCLUSIVE, REGION_LOCK, KREX)}


def parse_policies(text: str) -> tuple[Policy, ...]:
    """Return the policies of a list with commas; `solo`, the reference, is always the first.

    Raises:
        BenchUsageError: for an unknown name.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise BenchUsageError(f"no policy is named; there are {', '.join(POLICIES)}")
    for name in names:
        if name not in POLICIES:
            raise BenchUsageError(_unknown(name, list(POLICIES)))
    others = [POLICIES[name] for name in dict.fromkeys(names) if name != SOLO.name]
    return (SOLO, *others)


def _unknown(name: str, known: Sequence[str]) -> str:
    message = f"unknown policy {name!r}"
    for close in difflib.get_close_matches(name, known, n=1):
        return f"{message}; did you mean {close!r}?"
    return f"{message}; there are {', '.join(known)}"
