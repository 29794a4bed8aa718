"""The processes that are measured, in a runtime directory of their own; and their end."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import krex
from krex import region

T = TypeVar("T")

KREX = os.path.join(sysconfig.get_path("scripts"), "krex")
ACTOR = str(Path(__file__).with_name("actor.py"))

# A file in which a sibling notes the stretches in which it did not run: the last beat, how many
# stretches, then the beginning and end of each, in nanoseconds of the monotonic clock.
PAUSE_NS = 3_000_000
PAUSES = 4096
PULSE_SIZE = 16 * (PAUSES + 1)

# Bounds what hangs; measures nothing.
LIMIT_S = 120.0


def pause_offset(index: int) -> int:
    return 16 * (index + 1)


def wait_until(predicate: Callable[[], T], what: str) -> T:
    """Wait until `predicate` returns something true, and return it."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S} s: {what}")
        time.sleep(0.0005)
    return value


class _Left(BaseException):
    """Ends a forked holder's region."""


def _leave(*_: object) -> None:
    raise _Left


class Pulse:
    """When a sibling ran."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "w+b") as file:
            file.truncate(PULSE_SIZE)
            self._map = mmap.mmap(file.fileno(), PULSE_SIZE)

    def last_beat(self) -> int:
        return int(struct.unpack_from("<Q", self._map)[0])

    def pause_around(self, moment: int) -> tuple[int, int] | None:
        """Beginning and end of the stretch around `moment` in which it did not run."""
        (count,) = struct.unpack_from("<Q", self._map, 8)
        for index in reversed(range(count)):
            begin, end = struct.unpack_from("<QQ", self._map, pause_offset(index))
            if begin <= moment < end:
                return begin, end
        return None

    def close(self) -> None:
        self._map.close()


class Stage:
    """Processes that share a runtime directory; at the end nothing of them is left."""

    def __init__(self, freezer: str = "auto") -> None:
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="krex-bench-", dir="/dev/shm"))
        self.environment = dict(
            os.environ, KREX_RUNTIME_DIR=str(self.runtime_dir), KREX_FREEZER=freezer
        )
        self._processes: list[subprocess.Popen[str]] = []
        self._forked: set[int] = set()
        self._pulses = 0
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A second Ctrl-C must not leave half of it behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._close()
        finally:
            signal.signal(signal.SIGINT, before)

    def _close(self) -> None:
        for pid in set(self._forked):
            self.kill(pid)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.communicate()
        self._opened.close()
        subprocess.run(
            [KREX, "recover", "--purge"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def start(self, command: Sequence[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the bench alone
        )
        self._processes.append(process)
        return process

    def actor(self, *words: str, tenant: bool = True) -> subprocess.Popen[str]:
        launcher = [KREX, "run", "--name", words[0], "--"] if tenant else []
        return self.start([*launcher, sys.executable, ACTOR, *words])

    def siblings(
        self, count: int, threads: int = 20, busy: int = 0, pulses: bool = False
    ) -> list[Pulse]:
        """Start tenants of so many threads, of which `busy` compute; wait until all are there."""
        started = []
        found = []
        for _ in range(count):
            words = ["sibling", f"--threads={threads}", f"--busy={busy}"]
            if pulses:
                path = self.runtime_dir / f"pulse-{self._pulses}"
                self._pulses += 1
                pulse = Pulse(path)
                self._opened.callback(pulse.close)
                found.append(pulse)
                words.append(f"--pulse={path}")
            started.append(self.actor(*words))
        for process in started:
            expect(process, "ready")
        return found

    def groups(self) -> Groups:
        """The cgroups of all tenants."""
        mount = next(
            Path(words[4])
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if "cgroup2" in (words := line.split())
        )
        directories = []
        for tenant in self.status()["tenants"]:
            lines = Path(f"/proc/{tenant['pid']}/cgroup").read_text().splitlines()
            path = next(line[3:] for line in lines if line.startswith("0::"))
            directories.append(mount / path.lstrip("/"))
        groups = Groups(directories)
        self._opened.callback(groups.close)
        return groups

    def holder(self, threads: int = 1) -> Holder:
        process = self.actor("holder", f"--threads={threads}")
        expect(process, "ready")
        return Holder(process)

    def hogs(self, count: int) -> None:
        """Start busy processes that krex knows nothing of."""
        started = [self.actor("hog", tenant=False) for _ in range(count)]
        for process in started:
            expect(process, "ready")

    def fork_holder(self) -> int:
        """Fork a process that enters a region and spins in it; returns once it has.

        It ends by `kill`, or leaves the region properly by `leave`.
        """
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGUSR1, _leave)
                os.environ.update(self.environment)
                with contextlib.suppress(_Left), region.critical():
                    os.write(write_end, b"1")
                    while True:
                        pass
            finally:
                os._exit(1)
        os.close(write_end)
        self._forked.add(pid)
        entered = os.read(read_end, 1)
        os.close(read_end)
        if not entered:
            raise RuntimeError("the holder did not enter its region")
        return pid

    def leave(self, pid: int) -> None:
        """Tell a forked holder to leave its region; `kill` sees to its end."""
        os.kill(pid, signal.SIGUSR1)

    def kill(self, pid: int) -> None:
        """SIGKILL a forked holder, and wait for its end."""
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self._forked.discard(pid)

    def status(self) -> dict[str, Any]:
        return krex.snapshot(str(self.runtime_dir))

    def supervisor(self) -> dict[str, Any]:
        """The supervisor pair that is alive."""
        alive = [it for it in self.status()["supervisors"] if it["alive"]]
        if not alive:
            raise RuntimeError("no supervisor is alive")
        found: dict[str, Any] = alive[0]
        return found


class Groups:
    """Cgroups that are frozen without krex: what the kernel itself takes."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._controls = [os.open(it / "cgroup.freeze", os.O_WRONLY) for it in directories]
        self._events = [os.open(it / "cgroup.events", os.O_RDONLY) for it in directories]

    def freeze_and_thaw(self, hold: float, pause: float) -> float:
        """Seconds until all are frozen."""
        try:
            start = time.perf_counter()
            self._set(b"1")
            left = self._events
            while left:
                left = [it for it in left if b"frozen 1" not in os.pread(it, 128, 0)]
            seconds = time.perf_counter() - start
            time.sleep(hold)
        finally:
            self._set(b"0")
        time.sleep(pause)
        return seconds

    def _set(self, value: bytes) -> None:
        for control in self._controls:
            os.pwrite(control, value, 0)

    def close(self) -> None:
        for descriptor in (*self._controls, *self._events):
            os.close(descriptor)


class Holder:
    """A tenant that enters and leaves regions when told to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def measure(self, repeats: int, hold: float, pause: float) -> list[dict[str, Any]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        options = {"repeats": repeats, "hold": hold, "pause": pause}
        self._process.stdin.write(json.dumps(["measure", options]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        results: list[dict[str, Any]] = json.loads(line)
        return results


def expect(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != word:
        raise RuntimeError(f"{process.args!r} said {line!r} instead of {word!r}")
