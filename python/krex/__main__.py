"""``python -m krex``: the same commands as the program ``krex``."""

from __future__ import annotations

import sys

from krex.cli import main

if __name__ == "__main__":
    sys.exit(main())
