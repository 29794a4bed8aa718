"""Processes in a runtime directory of their own, for ``krex bench gate``; and their end."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from krex._native import native_program
from krex.bench.commands import own_program
from krex.bench.directories import Directory
from krex.bench.errors import BenchError
from krex.bench.gate_process import PULSE
from krex.bench.interruption import Interruption
from krex.bench.processes import end_with_parent

# Bounds what hangs; measures nothing.
_LIMIT_S = 60.0
_KILL_LIMIT_S = 10.0
# Longest sleep without a look at signals.
_LOOK_MS = 100


class Pulse:
    """When a sibling ran."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "w+b") as file:
            file.truncate(PULSE.size)
            self._map = mmap.mmap(file.fileno(), PULSE.size)

    def last_beat(self) -> int:
        """Return when it ran last, in nanoseconds of the monotonic clock."""
        return int(PULSE.unpack_from(self._map)[0])

    def resumed(self) -> int:
        """Return when it ran again after the last stretch in which it did not."""
        return int(PULSE.unpack_from(self._map)[1])


class Stage:
    """Siblings, a timer and holders that share a runtime directory, which this process uses, too.

    At the end nothing of them is left.
    """

    def __init__(self, interruption: Interruption) -> None:
        self._interruption = interruption
        self._krex = native_program()
        self._own = Directory()
        self._directory = self._own.path
        self._runtime_dir = self._directory / "krex"
        self._runtime_dir.mkdir(mode=0o700)
        self._environment = os.environ | {"KREX_RUNTIME_DIR": str(self._runtime_dir)}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._timer: subprocess.Popen[bytes] | None = None
        self._rivals: list[subprocess.Popen[bytes]] = []
        self.pulses: list[Pulse] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, *words: str, is_tenant: bool = True) -> subprocess.Popen[bytes]:
        """Start a process of `gate_process`, and wait until it is ready."""
        launcher = [self._krex, "run", "--name", words[0], "--"] if is_tenant else []
        process = subprocess.Popen(
            [*launcher, *own_program("krex.bench.gate_process", *words)],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            preexec_fn=end_with_parent(),
        )
        self._processes.append(process)
        self._read(process)
        return process

    def add_siblings(self, count: int) -> None:
        """Start idle siblings of one thread."""
        for number in range(count):
            pulse = Pulse(self._directory / f"pulse-{number}")
            self.pulses.append(pulse)
            self.start("sibling", str(pulse.path))

    def time_regions(self, count: int) -> list[dict[str, Any]]:
        """Return what entering and leaving took beside the siblings, in seconds."""
        if self._timer is None:
            self._timer = self.start("timer")
        self._ask(self._timer, count)
        found: list[dict[str, Any]] = json.loads(self._read(self._timer))
        return found

    def time_rivals(self, count: int) -> list[list[tuple[int, int, int]]]:
        """Return, of two processes, when each of `count` regions was asked for, entered and left.

        In nanoseconds of the monotonic clock.
        """
        if not self._rivals:
            self._rivals = [self.start("rival") for _ in range(2)]
        for rival in self._rivals:
            self._ask(rival, count)
        return [[tuple(it) for it in json.loads(self._read(rival))] for rival in self._rivals]

    def _ask(self, process: subprocess.Popen[bytes], count: int) -> None:
        assert process.stdin is not None
        process.stdin.write(b"%d\n" % count)

    def recover(self) -> int:
        """Kill a holder; return the nanoseconds until the last sibling runs again."""
        holder = self.start("holder", is_tenant=False)
        time.sleep(0.01)  # long enough for the siblings to notice that they did not run
        moment = time.monotonic_ns()
        holder.kill()
        self._processes.remove(holder)
        _reap(holder)
        self._wait(
            lambda: all(it.resumed() > moment for it in self.pulses), "siblings did not run again"
        )
        return max(it.resumed() for it in self.pulses) - moment

    def _read(self, process: subprocess.Popen[bytes]) -> bytes:
        """Return the next line that a process prints; it prints one for each question."""
        assert process.stdout is not None
        line = b""
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            self._wait(lambda: poll.poll(_LOOK_MS), "a process of the bench did not answer")
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                self._wait(lambda: process.poll() is not None, "a process of the bench did not end")
                raise BenchError(f"a process of the bench ended with status {process.returncode}")
            line += part
        return line

    def _wait(self, predicate: Callable[[], object], otherwise: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while True:
            if self._interruption.signal is not None:
                raise Interrupted
            if predicate():
                return
            if time.monotonic() > deadline:
                raise BenchError(f"{otherwise} within {_LIMIT_S:g} s")
            time.sleep(0.0005)

    @contextlib.contextmanager
    def as_own(self) -> Iterator[None]:
        """Let this process use the runtime directory."""
        before = os.environ.get("KREX_RUNTIME_DIR")
        os.environ["KREX_RUNTIME_DIR"] = str(self._runtime_dir)
        try:
            yield
        finally:
            del os.environ["KREX_RUNTIME_DIR"]
            if before is not None:
                os.environ["KREX_RUNTIME_DIR"] = before

    def close(self) -> None:
        """End all processes, take krex out of the runtime directory, and remove it."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            _reap(process)
        self._own.remove(self._krex)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a killed process; not for ever, since it may hang in the kernel."""
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_LIMIT_S)


class Interrupted(Exception):  # noqa: N818 - not an error
    """Ctrl-C or SIGTERM came; `Interruption` knows which."""
