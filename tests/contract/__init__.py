"""What a CUDA driver does, as far as krex relies on it: one suite for the real and the simulated.

Each case runs in a process of its own. Times are only compared with generous bounds. To run it
where there is no pytest: `PYTHONPATH=tests python -m contract --driver real [NAME…]`.

All was seen on a real driver (580.159.04, on an H200), except for this, which is what the simulated
one does and was **not yet seen on a real one**:

- of `beside_captures.py`: cuStreamGetFlags of another stream than the captured one;
- of `drains.py`: that nothing can be done in a context that has ended and was made current; that
  asking for an event ends with no other errors than CONTEXT_IS_DESTROYED.
"""

from __future__ import annotations

from contract import (
    beside_captures,
    contexts,
    devices,
    drains,
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
    "drains",
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
