"""One run of one command, and what it printed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Outcome = Literal["ok", "crashed", "timed out", "no result", "bad result", "not started"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# What is believed, in milliseconds: from a millionth of a nanosecond to thirty years. Ratios and
# means of such numbers are finite.
_SHORTEST_MS, _LONGEST_MS = 1e-9, 1e12
# How much of a result's text is kept.
_LONGEST = 300
_MOST_REASONS = 16


@dataclass(frozen=True)
class Measurement:
    """What came of one run of a command."""

    policy: str
    #: Which round, from 1; and which place in the policy's turn, from 0.
    round: int
    position: int
    #: Which command, as an index into the run's list.
    command: int
    kind: str
    outcome: Outcome
    #: What went wrong, for people.
    detail: str
    ms: float | None
    verdict: str | None
    reasons: tuple[str, ...]
    #: Seconds since 1970.
    started_at: float
    ended_at: float
    #: None if it was not started or ended by a signal.
    exit_status: int | None
    signal: int | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self) | {"reasons": list(self.reasons)}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Measurement:
        """Undo `to_dict`; other keys are ignored.

        Raises:
            KeyError, TypeError, ValueError: if it is not what `to_dict` returned.
        """
        values = {it.name: found[it.name] for it in fields(cls)}
        ms = values["ms"]
        if values["outcome"] not in OUTCOMES or (values["outcome"] == "ok") != is_duration(ms):
            raise ValueError("not a measurement")
        return cls(**(values | {"reasons": tuple(values["reasons"])}))


@dataclass(frozen=True)
class Printed:
    """What a command's output says."""

    outcome: Outcome
    detail: str = ""
    kind: str | None = None
    ms: float | None = None
    verdict: str | None = None
    reasons: tuple[str, ...] = ()


def read_output(output: str, kind: str | None) -> Printed:
    """Find the result in a command's output: the last line that is a JSON object with `ms`.

    `kind` is what it should be; None: whatever was printed.
    """
    # Not `splitlines`: it would also split at characters that JSON texts may contain.
    for line in reversed(output.split("\n")):
        found = _object(line)
        if found is not None and "ms" in found:
            return _check(found, kind)
    return Printed("no result", "printed no line of JSON with `kind` and `ms`")


def _object(line: str) -> dict[str, Any] | None:
    if not line.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _check(found: dict[str, Any], kind: str | None) -> Printed:
    ms, printed = found["ms"], found.get("kind")
    if not isinstance(printed, str) or not printed:
        return Printed("bad result", "its line of JSON has no `kind`")
    if kind is not None and printed != kind:
        return Printed("bad result", f"printed the kind {printed!r} instead of {kind!r}"[:_LONGEST])
    if not is_duration(ms):
        return Printed("bad result", f"`ms` is no number from 1e-9 to 1e12: {ms!r}"[:_LONGEST])
    verdict, reasons = found.get("verdict"), found.get("reasons")
    return Printed(
        "ok",
        kind=printed[:_LONGEST],
        ms=float(ms),
        verdict=verdict[:_LONGEST] if isinstance(verdict, str) else None,
        reasons=tuple(str(it)[:_LONGEST] for it in reasons[:_MOST_REASONS])
        if isinstance(reasons, list)
        else (),
    )


def is_duration(value: Any) -> bool:
    """Return whether it is a number of milliseconds that can be believed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return _SHORTEST_MS <= value <= _LONGEST_MS  # NaN is not either
