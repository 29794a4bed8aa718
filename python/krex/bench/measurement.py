"""One run of one command, and what it printed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Outcome = Literal["ok", "crashed", "timed out", "no result", "bad result", "not started"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

# What is believed, in milliseconds: from a millionth of a nanosecond to thirty years. Ratios and
# means of such numbers are finite.
_SHORTEST_MS, _LONGEST_MS = 1e-9, 1e12
# Rounds, positions and commands are fewer; times (in seconds since 1970) are earlier.
_MOST, _LATEST = 10**9, 1e12
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
        outcome, ms, reasons = found["outcome"], found["ms"], found["reasons"]
        if outcome not in OUTCOMES or not isinstance(reasons, list) or not found["kind"]:
            raise ValueError("not a measurement")
        if (outcome == "ok") != is_duration(ms) or (outcome != "ok" and ms is not None):
            raise ValueError(f"not a measurement: {outcome} with {ms!r} ms")
        return cls(
            policy=_text(found["policy"]),
            round=integer(found["round"], 1, _MOST),
            position=integer(found["position"], 0, _MOST),
            command=integer(found["command"], 0, _MOST),
            kind=_text(found["kind"]),
            outcome=outcome,
            detail=_text(found["detail"]),
            ms=ms,
            verdict=None if found["verdict"] is None else _text(found["verdict"]),
            reasons=tuple(_text(it) for it in reasons),
            started_at=number(found["started_at"], 0, _LATEST),
            ended_at=number(found["ended_at"], 0, _LATEST),
            exit_status=_status(found["exit_status"]),
            signal=_status(found["signal"]),
        )


def number(value: Any, least: float, most: float) -> float:
    """Return a number that was read from a file.

    Raises:
        ValueError: if it is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{value!r} is no number"[:_LONGEST])
    if not least <= value <= most:  # NaN is not either
        raise ValueError(f"{value!r} is no number from {least} to {most}"[:_LONGEST])
    return float(value)


def integer(value: Any, least: int, most: int) -> int:
    """Return a whole number that was read from a file.

    Raises:
        ValueError: if it is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{value!r} is no whole number from {least} to {most}"[:_LONGEST])
    return value


def _status(value: Any) -> int | None:
    return None if value is None else integer(value, 0, 255)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text"[:_LONGEST])
    return value


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
