"""CuPy: the runtime, its own compiler, and the driver by name."""

from __future__ import annotations

import cupy
import told


def total() -> int:
    return int((cupy.arange(1000) * 2).sum())


assert total() == 999000
told.ready()
assert total() == 999000
told.submitted(4, exactly=False)
