"""The main job of krex, shown: `krex bench` on two CPUs, so that it is crowded on any machine.

Whole evaluation commands run one at a time, all at once with nothing between them, and all at
once with krex. The last line says whether that showed what krex is for. Exit status: 0 if it did;
1 if it did not, such as when a command broke under krex; 3 if it is inconclusive, since commands
that ran alone did not agree with each other. Options of `krex bench` may follow, and come last:
they win.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

from krex.bench.options import INCONCLUSIVE
from krex.cli import main

CPUS = 2
# krex's share of timings within 5%, in shares of solo's own, which is all that can be had.
LEAST_OF_SOLO = 0.9
# And in points above that of commands with nothing between them.
LEAST_GAIN = 0.3


def demo() -> int:
    cpus = ",".join(str(it) for it in sorted(os.sched_getaffinity(0))[:CPUS])
    options = ["--policies=solo,ungated,krex", "--width=8", "--count=9", "--rounds=4"]
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "results.json")
        options += [f"--cpus={cpus}", f"--export-json={path}", *sys.argv[1:]]
        status = main(["bench", *options])
        if status not in (0, INCONCLUSIVE) or not os.path.exists(path):
            return status
        with open(path, encoding="utf-8") as file:
            policies = {it["policy"]: it for it in json.load(file)["policies"]}
    if not {"solo", "ungated", "krex"} <= set(policies):
        return status
    if status == INCONCLUSIVE and not broken(policies["krex"]):
        print("\nneither shown nor not (exit status 3): commands that ran alone did not agree")
        print("with each other, or too many broke; try again on a quieter machine")
        return status
    failed = failures(**policies)
    print("\n" + ("not shown: " + "; ".join(failed) if failed else "shown: " + shown(**policies)))
    return 1 if failed else 0


def failures(solo: dict[str, Any], ungated: dict[str, Any], krex: dict[str, Any]) -> list[str]:
    if broken(krex):
        return [f"{broken(krex)} of {krex['commands']} commands broke under krex"]
    found = []
    least = LEAST_OF_SOLO * solo["within_5pct"]
    if krex["within_5pct"] < least:
        found.append(f"less than {least:.0%} of krex's timings are within 5% of solo's")
    if krex["within_5pct"] < ungated["within_5pct"] + LEAST_GAIN:
        found.append(f"they are not {100 * LEAST_GAIN:.0f} points above ungated's")
    if krex["commands_per_minute"] <= solo["commands_per_minute"]:
        found.append("krex runs no more commands a minute than one at a time")
    return found


def broken(entry: dict[str, Any]) -> int:
    """Commands of a policy that are in none of its timings."""
    return int(entry["commands"] - entry["usable"])


def shown(solo: dict[str, Any], ungated: dict[str, Any], krex: dict[str, Any]) -> str:
    gain = krex["commands_per_minute"] / solo["commands_per_minute"]
    return (
        f"with krex {krex['within_5pct']:.0%} of the timings are within 5% of solo's "
        f"(ungated: {ungated['within_5pct']:.0%}), at {gain:.1f} times solo's throughput"
    )


if __name__ == "__main__":
    sys.exit(demo())
