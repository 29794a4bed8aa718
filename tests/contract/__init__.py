"""What a CUDA driver does, as far as krex relies on it: one suite for the real and the simulated.

Each case runs in a process of its own. Times are only compared with generous bounds. To run it
where there is no pytest: `PYTHONPATH=tests python -m contract --driver real [NAME…]`.
"""

from __future__ import annotations

from contract import (
    beside_captures,
    contexts,
    devices,
    entry_points,
    events,
    graphs,
    kernels,
    locks,
    memory,
    processes,
    streams,
)
from contract.support import CASES, run_case

__all__ = [
    "CASES",
    "beside_captures",
    "contexts",
    "devices",
    "entry_points",
    "events",
    "graphs",
    "kernels",
    "locks",
    "memory",
    "processes",
    "run_case",
    "streams",
]
