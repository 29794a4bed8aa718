"""A forked child that uses the driver, in a parent that never does."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

child = os.fork()
if child == 0:
    runpy.run_path(str(Path(__file__).with_name("01_bindings.py")))
    sys.exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
