"""The main job of krex, shown: `krex bench` on two CPUs, so that it is crowded on any machine.

Whole evaluation commands run one at a time, all at once with nothing between them, and all at
once with krex. Options of `krex bench` may follow, and come last: they win.
"""

from __future__ import annotations

import os
import sys

from krex.bench.options import INCONCLUSIVE
from krex.cli import main

CPUS = 2


def demo() -> int:
    cpus = ",".join(str(it) for it in sorted(os.sched_getaffinity(0))[:CPUS])
    options = ["--policies=solo,ungated,krex", "--width=8", "--count=9", "--rounds=4"]
    status = main(["bench", *options, f"--cpus={cpus}", *sys.argv[1:]])
    # Something else disturbs the machine, and the last lines say so: the demo has not failed.
    return 0 if status == INCONCLUSIVE else status


if __name__ == "__main__":
    sys.exit(demo())
