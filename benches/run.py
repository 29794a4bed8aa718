"""Measures what krex costs, and prints tables: `make bench`.

Each part runs in runtime directories of its own and leaves nothing behind. The results are also
written as JSON, with the machine's description.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from krex.bench import machine
from parts import PARTS, ROOT
from results import lines, wait_until_quiet


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what krex costs.")
    parser.add_argument(
        "--only", metavar="PART,…", help=f"these parts only, of: {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats: minutes, not more")
    parser.add_argument(
        "--patience",
        type=float,
        default=0,
        metavar="SECONDS",
        help="how long to wait, before each part, until nothing else uses the machine",
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "build" / "bench.json", help="where the results go"
    )
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end as with Ctrl-C

    found = machine.describe()
    print(machine.in_words(found))
    results = []
    for name in names:
        share = wait_until_quiet(arguments.patience)
        if share >= 0.05:
            say(f"note: other processes use {share:.0%} of the machine; {name} suffers from it")
        say(f"{name} …")
        started = time.monotonic()
        part = PARTS[name](arguments.quick)
        say(f"{name}: {time.monotonic() - started:.0f} s")
        if share >= 0.05:
            part.notes.append(f"other processes used {share:.0%} of the machine beforehand")
        print("\n" + "\n".join(lines(part)), flush=True)
        results.append(part.to_dict() | {"busy_before": round(share, 3)})
        # After each part: what was measured is not lost if a later one fails.
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": found, "parts": results}, indent=1) + "\n")
    print(f"\nwritten to {arguments.json}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)
