"""The driver for tests without a GPU: where it is, and a device of one's own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LIBRARY = Path(
    os.environ.get("KREX_SIMGPU_LIBRARY")
    or Path(__file__).parents[1] / "build" / "simgpu" / "libcuda.so.1"
)


@dataclass(frozen=True)
class Entry:
    """A line of a journal."""

    time: int
    """Nanoseconds of CLOCK_MONOTONIC."""
    pid: int
    tid: int
    name: str
    """The entry point that was called; "-" for what happened by itself."""
    stream: int
    kind: str
    """launch, copy, memset, graph, host, event, alloc, free, value, prefetch, other: a
    submission; order: a stream's wait for an event; capture, instantiate, module, resource;
    birth and born, death and dead: the beginning and the end of making a context, and of
    destroying one; busy and idle: the process's first outstanding work, and the end of its
    last."""


SUBMISSIONS = frozenset(
    {
        "launch",
        "copy",
        "memset",
        "graph",
        "host",
        "event",
        "alloc",
        "free",
        "value",
        "prefetch",
        "other",
    }
)


class SimGpu:
    """A device that all processes with this environment share."""

    def __init__(self, **settings: object) -> None:
        assert LIBRARY.exists(), f"{LIBRARY} is missing: make simgpu"
        self.directory = Path(tempfile.mkdtemp(prefix="krex-simgpu-", dir="/dev/shm"))
        paths = [str(LIBRARY.parent), os.environ.get("LD_LIBRARY_PATH", "")]
        self.faults = self.directory / "faults"
        self.environment = {
            "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
            "KREX_SIMGPU_LIBRARY": str(LIBRARY),
            "KREX_SIMGPU_DIR": str(self.directory),
            "KREX_SIMGPU_JOURNAL": "1",
            "KREX_SIMGPU_FAULTS_FILE": str(self.faults),
        }
        for name, value in settings.items():
            self.environment[f"KREX_SIMGPU_{name.upper()}"] = str(value)

    def fail(self, *directives: str) -> None:
        """Fail in this way from now on: see rust/krex-simgpu/src/faults.rs."""
        new = self.faults.with_name("faults.new")
        new.write_text("\n".join(directives))
        new.rename(self.faults)

    def journal(self, pid: int | None = None) -> list[Entry]:
        """What reached the driver, by this process or all of them, in order of time."""
        entries = []
        for path in self.directory.glob("journal.*" if pid is None else f"journal.{pid}"):
            for line in path.read_text().splitlines():
                time, process, thread, name, stream, kind = line.split()
                entries.append(
                    Entry(int(time), int(process), int(thread), name, int(stream, 16), kind)
                )
        return sorted(entries, key=lambda it: it.time)

    def submissions(self, pid: int | None = None) -> list[Entry]:
        return [it for it in self.journal(pid) if it.kind in SUBMISSIONS]

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def device(**settings: object) -> Iterator[SimGpu]:
    made = SimGpu(**settings)
    try:
        yield made
    finally:
        made.close()
