"""What sharing a machine does to measurements: ``krex bench``, and `region` for its commands.

>>> from krex.bench import region
>>> with region("my kernel") as timed:
...     ms = run_the_timed_loop()
>>> print(json.dumps({"kind": "my kernel", "ms": ms, **timed.to_dict()}))

``docs/method.md`` says what is measured and what would make it wrong. numpy is needed for the
built-in commands alone, and comes with the extra ``bench``.
"""

from __future__ import annotations

from krex.bench.marker import region

__all__ = ["region"]
