"""An evaluation command for tests of `krex bench`: logs when it was in its region.

Its line of JSON names 1.0 ms always. With ``--meet N`` it waits, before its region and, where
regions may overlap, inside it, until N commands have come as far under the same policy.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import krex.bench
import krex.region

LIMIT_S = 30.0


def note(path: Path, word: str) -> None:
    line = {"word": word, "policy": POLICY, "pid": os.getpid(), "at": time.monotonic_ns()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def meet(path: Path, word: str, count: int) -> None:
    """Busy, as a holder has to be."""
    note(path, word)
    deadline = time.monotonic() + LIMIT_S
    while sum(it["word"] == word and it["policy"] == POLICY for it in read(path)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"fewer than {count} came to {word}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("log", type=Path)
    parser.add_argument("--meet", type=int, default=0)
    parser.add_argument("--direct", action="store_true", help="krex.region.critical() itself")
    arguments = parser.parse_args()
    note(arguments.log, "begin")
    if POLICY in ("ungated", "region-lock", "krex"):
        meet(arguments.log, "before", arguments.meet)
    timed: Any = krex.region.critical() if arguments.direct else krex.bench.region("test")
    with timed:
        note(arguments.log, "enter")
        if POLICY == "ungated":
            meet(arguments.log, "inside", arguments.meet)
        end = time.monotonic() + 0.03
        while time.monotonic() < end:
            pass
        note(arguments.log, "leave")
    told = {"verdict": timed.report.verdict} if arguments.direct else timed.to_dict()
    note(arguments.log, "end")
    print("not JSON")
    print(json.dumps({"kind": "test", "ms": 1.0, **told}))


if __name__ == "__main__":
    POLICY = os.environ["KREX_BENCH_POLICY"]
    main()
