"""What a CUDA driver does, as far as krex relies on it: one suite for the real and the simulated.

Each case runs in a process of its own. Times are only compared with generous bounds. To run it
where there is no pytest: `PYTHONPATH=tests python -m contract --driver real [NAME…]`.

All was seen on a real driver (580.159.04, on an H200), except for this, which is what the simulated
one does and was **not yet seen on a real one**:

- all of `drains.py`;
- of `graphs.py`: `captures_begin_and_end_in_their_place` from its first success in ending on; of
  `another_thread_ends_a_capture_and_gets_no_graph`, the thread-local one and the status; the three
  cases about the order of graphs;
- of `streams.py`: `a_stream_can_be_drained_without_a_current_context` and
  `the_default_stream_needs_a_current_context`;
- of `beside_captures.py`: cuMemcpyHtoD, cuModuleUnload, cuMemFreeAsync, cuGraphLaunch,
  cuEventDestroy, cuCtxSetCurrent, cuStreamGetFlags;
- of `entry_points.py`: everything about names that are not found, but that an unknown one is no
  error, has no address, and has status 1.
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
