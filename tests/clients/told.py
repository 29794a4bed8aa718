"""What the Python clients say, and what they wait for: see README.md."""

from __future__ import annotations

import sys


def ready() -> None:
    """Everything is made, and nothing is outstanding."""
    print("ready", flush=True)
    sys.stdin.readline()


def submitted(count: int, exactly: bool = True) -> None:
    """So many submissions were made since, and the device is done with them."""
    print("submitted", *(() if exactly else ("at least",)), count, flush=True)
    sys.stdin.read()
