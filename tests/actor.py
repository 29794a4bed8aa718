"""An actor: does what lines of JSON on standard input tell it, answers on standard output.

A line is [word, arguments]; the answer is {"value": …} or {"error": class, "message": …}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import krex
from krex import region

entered: list[region.critical] = []
submissions: list[Any] = []
actions: dict[str, Callable[..., Any]] = {}


def action(function: Callable[..., Any]) -> Callable[..., Any]:
    actions[function.__name__] = function
    return function


@action
def enter(**options: Any) -> int:
    """Enter a region; returns its epoch."""
    critical = region.critical(**options)
    critical.__enter__()
    entered.append(critical)
    return critical.epoch


@action
def leave() -> dict[str, Any]:
    """Leave the region; returns the report. A revoked one raises, with its report lost."""
    critical = entered.pop()
    critical.__exit__(None, None, None)
    return critical.report.to_dict()


@action
def leave_anyhow() -> dict[str, Any]:
    """Leave the region; returns the report also if it was revoked."""
    critical = entered.pop()
    try:
        critical.__exit__(None, None, None)
    except region.RegionRevoked:
        pass
    return critical.report.to_dict()


@action
def begin_submission(**options: Any) -> None:
    submission = krex.submission(**options)
    submission.__enter__()
    submissions.append(submission)


@action
def end_submission() -> None:
    submissions.pop().__exit__(None, None, None)


@action
def submit(**options: Any) -> float:
    """A whole submission; returns when it was inside, in seconds of the monotonic clock."""
    with krex.submission(**options):
        return time.monotonic()


@action
def spin(seconds: float) -> int:
    """Keep a CPU busy; returns how many rounds it made."""
    rounds = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rounds += 1
    return rounds


@action
def say(phase: str) -> None:
    krex.phase(phase)


@action
def ping() -> int:
    return os.getpid()


@action
def run(code: str) -> Any:
    """Anything else: runs `code`, returns what it assigns to `value`."""
    scope: dict[str, Any] = {"krex": krex, "region": region, "entered": entered}
    exec(code, scope)
    return scope.get("value")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    print(json.dumps({"value": {"pid": os.getpid()}}), file=answers, flush=True)
    for line in sys.stdin.buffer:
        word, arguments = json.loads(line)
        try:
            outcome = {"value": actions[word](**arguments)}
        except Exception as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(outcome), file=answers, flush=True)


if __name__ == "__main__":
    main()
