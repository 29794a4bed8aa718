"""An actor: does what lines of JSON on standard input tell it, answers on standard output.

A line is [word, arguments]; the answer is {"value": …} or {"error": class, "message": …}, with
"at", the times of the monotonic clock just before and just after.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import krex
from krex import region

entered: list[region.critical] = []
submissions: list[Any] = []
actions: dict[str, Callable[..., Any]] = {}

# While a region is held through `hold`, some CPU time is used, since a holder that uses none for
# 250 ms is taken for stalled.
BURN = 0.006
PAUSE = 0.012
burning: list[region.critical] = []
# The longest time without any burning, since the last `hold`.
longest_gap = 0.0
last_burnt = 0.0


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
def hold(**options: Any) -> dict[str, Any]:
    """Enter a region, and use some CPU time until it is left, unless another process does."""
    global last_burnt, longest_gap
    critical = region.critical(**options)
    critical.__enter__()
    entered.append(critical)
    joined = critical.joined
    if not joined and len(entered) == 1:
        burning.append(critical)
        longest_gap = 0.0
        last_burnt = time.monotonic()
    return {"epoch": critical.epoch, "joined": joined}


@action
def starved() -> float:
    """For how long this process did not get to burning, at most, since `hold`."""
    return longest_gap


@action
def leave() -> dict[str, Any]:
    """Leave the region; returns the report. A revoked one raises, with its report lost."""
    critical = forget()
    critical.__exit__(None, None, None)
    return critical.report.to_dict()


@action
def leave_anyhow() -> dict[str, Any]:
    """Leave the region; returns the report also if it was revoked."""
    critical = forget()
    with contextlib.suppress(region.RegionRevoked):
        critical.__exit__(None, None, None)
    return critical.report.to_dict()


@action
def whole(seconds: float = 0.01, **options: Any) -> dict[str, Any]:
    """A whole region, with a busy CPU; returns the report also if it was revoked."""
    critical = region.critical(**options)
    critical.__enter__()
    spin(seconds)
    with contextlib.suppress(region.RegionRevoked):
        critical.__exit__(None, None, None)
    return critical.report.to_dict()


def forget() -> region.critical:
    critical = entered.pop()
    if critical in burning:
        burning.remove(critical)
    return critical


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


@action
def call(function: str, arguments: dict[str, Any], module: str = "cases") -> Any:
    """Run a function of cases.py, or of another module."""
    import importlib
    import traceback

    try:
        return getattr(importlib.import_module(module), function)(**arguments)
    except AssertionError as error:
        raise AssertionError(traceback.format_exc()) from error


@action
def leave_code(code: int) -> None:
    """End this process, with `code` as its exit status."""
    sys.exit(code)


@action
def fork(path: str) -> int:
    """Make a child that is an actor, too, and takes its words from the socket at `path`."""
    child = os.fork()
    if child != 0:
        return child
    # What was entered is the parent's: dropping it must not end it.
    for inherited in (entered, submissions, burning):
        inherited.clear()
    gc.collect()
    serve_at(path)
    sys.exit(0)


def serve_at(path: str) -> None:
    """Serve whoever listens at `path`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        serve(connection.fileno(), connection.fileno())


def read_words(source: int) -> Iterator[bytes]:
    """The lines that come from a descriptor; burns between them, while a region is held."""
    buffer = b""
    while True:
        while b"\n" not in buffer:
            if burning:
                burn()
                if not select.select([source], [], [], PAUSE)[0]:
                    continue
            chunk = os.read(source, 65536)
            if not chunk:
                return
            buffer += chunk
        line, _, buffer = buffer.partition(b"\n")
        yield line


def burn() -> None:
    global last_burnt, longest_gap
    end = time.thread_time() + BURN
    while time.thread_time() < end:
        pass
    now = time.monotonic()
    longest_gap = max(longest_gap, now - last_burnt)
    last_burnt = now


def answer(sink: int, outcome: dict[str, Any]) -> None:
    data = json.dumps(outcome).encode() + b"\n"
    while data:
        data = data[os.write(sink, data) :]


def serve(source: int, sink: int) -> None:
    answer(sink, {"value": {"pid": os.getpid()}, "at": [time.monotonic()] * 2})
    for line in read_words(source):
        word, arguments = json.loads(line)
        started = time.monotonic()
        try:
            outcome = {"value": actions[word](**arguments)}
        except Exception as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
            report = getattr(error, "report", None)
            if report is not None:
                outcome["report"] = report.to_dict()
        outcome["at"] = [started, time.monotonic()]
        outcome["gap"] = longest_gap
        answer(sink, outcome)


def main() -> None:
    if len(sys.argv) > 1:
        serve_at(sys.argv[1])
    else:
        serve(0, os.dup(1))


if __name__ == "__main__":
    main()
