"""Siblings and holders under `krex run`, whoever starts their processes and ends them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import selectors
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

KREX = os.path.join(sysconfig.get_path("scripts"), "krex")
_HERE = str(Path(__file__).parents[1])

#: Bounds what hangs; measures nothing. Contexts are made one after the other, and torch takes
#: seconds.
LIMIT_S = 90.0

Start = Callable[[Sequence[str]], "subprocess.Popen[Any]"]


def program(module: str, *words: str) -> list[str]:
    """Return the command line that runs `main` of a module of this package."""
    script = f"import sys; sys.path.insert(0, {_HERE!r}); import gpu.{module} as it; it.main()"
    return [sys.executable, "-c", script, *words]


def read_line(process: subprocess.Popen[Any], limit: float = LIMIT_S) -> str:
    """Return a line of a process's output.

    Raises:
        RuntimeError: if it ends without one, or none comes in time.
    """
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        # Lines are answers to what was asked, so none is ever in a buffer by then.
        if not selector.select(limit):
            raise RuntimeError(f"{_words(process)} said nothing within {limit:g} s")
    line = process.stdout.readline()
    text = line.decode() if isinstance(line, bytes) else str(line)
    if not text:
        raise RuntimeError(f"{_words(process)} ended with {process.wait(LIMIT_S)}")
    return text.strip()


def expect(process: subprocess.Popen[Any], word: str) -> None:
    """Wait until a process says a word.

    Raises:
        RuntimeError: if it says something else.
    """
    line = read_line(process)
    if line != word:
        raise RuntimeError(f"{_words(process)} said {line!r} instead of {word!r}")


def _words(process: subprocess.Popen[Any]) -> str:
    words = process.args if isinstance(process.args, list) else [process.args]
    return " ".join(str(it) for it in words[-3:])


class Holder:
    """A process that times kernels when told to."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process

    def measure(
        self,
        kernel: str,
        count: int,
        *,
        region: bool = True,
        launches: int = 50,
        warm_up_s: float = 0.05,
        hold_s: float = 0.0,
        left: int = 0,
    ) -> list[dict[str, Any]]:
        """Return what `count` regions (or stretches outside of any) gave."""
        orders = {
            "kernel": kernel,
            "count": count,
            "region": region,
            "launches": launches,
            "warm_up_s": warm_up_s,
            "hold_s": hold_s,
            "left": left,
        }
        assert self.process.stdin is not None
        line = json.dumps(orders) + "\n"
        is_text = isinstance(self.process.stdin, io.TextIOBase)
        self.process.stdin.write(line if is_text else line.encode())
        self.process.stdin.flush()
        found: list[dict[str, Any]] = json.loads(read_line(self.process, 2 * LIMIT_S))
        return found


class Crew:
    """Starts siblings and holders of one device.

    Args:
        start: starts a process with pipes as its input and output, and sees to its end.
        device: krex's name of the device.
    """

    def __init__(self, start: Start, device: str) -> None:
        self._start = start
        self._device = device

    def launcher(self, name: str) -> list[str]:
        """Return the words of `krex run` before a command."""
        return [KREX, "run", "--device", self._device, "--name", name, "--"]

    def run(self, *command: str, name: str) -> subprocess.Popen[Any]:
        """Start a command under `krex run`."""
        return self._start([*self.launcher(name), *command])

    def holder(self, kind: str) -> Holder:
        """Start a holder whose kernels are those of `torch` or of the `driver` alone."""
        process = self.run(*program("holder", kind), name="holder")
        expect(process, "ready")
        return Holder(process)

    @contextlib.contextmanager
    def siblings(
        self, count: int, kind: str, *, preload: bool = True
    ) -> Iterator[list[subprocess.Popen[Any]]]:
        """Have siblings of a kind of `load.py`, with the interposer or without."""
        without = [] if preload else ["env", "KREX_PRELOAD=0"]
        started = [
            self._start([*without, *self.launcher(f"{kind} {it}"), *program("load", kind)])
            for it in range(count)
        ]
        try:
            for process in started:
                expect(process, "ready")
            yield started
        finally:
            for process in started:
                end(process)

    @contextlib.contextmanager
    def births(self, count: int) -> Iterator[list[int]]:
        """Have so many others that do nothing but start, make a context, and exit.

        The list that it yields has one status for each that has ended.
        """

        def once() -> int:
            process = self.run(*program("load", "birth"), name="birth")
            try:
                return process.wait(LIMIT_S)
            finally:
                _close(process)

        with self._repeating(count, once) as done:
            yield done

    @contextlib.contextmanager
    def killed(self, count: int) -> Iterator[list[int]]:
        """Have so many others that are killed with work outstanding, and replaced by new ones.

        The list that it yields has one status for each that has ended.
        """
        generator = random.Random(1)

        def once() -> int:
            process = self.run(*program("load", "flood"), name="flood")
            try:
                expect(process, "ready")
                time.sleep(generator.random() * 0.05)
            finally:
                process.kill()
                status = process.wait(LIMIT_S)
                _close(process)
            return status

        with self._repeating(count, once) as done:
            yield done

    @contextlib.contextmanager
    def _repeating(self, count: int, once: Callable[[], int]) -> Iterator[list[int]]:
        stop = threading.Event()
        done: list[int] = []
        failures: list[BaseException] = []

        def work() -> None:
            while not stop.is_set():
                try:
                    done.append(once())
                except BaseException as error:
                    failures.append(error)
                    return

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            # Not before each has ended once: the first starts are slower than the later ones.
            deadline = time.monotonic() + LIMIT_S
            while len(done) < count and not failures:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"only {len(done)} ended within {LIMIT_S:g} s")
                time.sleep(0.01)
            yield done
        finally:
            stop.set()
            for thread in threads:
                thread.join(LIMIT_S)
        if failures:
            raise failures[0]


def end(process: subprocess.Popen[Any], limit: float = 20.0) -> None:
    """Let a process end by its standard input's end, or, too late, by SIGKILL."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(limit)
    _close(process)


def _close(process: subprocess.Popen[Any]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()
    # Whoever started it may well close them again.
    process.stdin = process.stdout = None
