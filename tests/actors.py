"""Actors by the dozen: a process that has imported krex already, and forks one on request.

Run as a program it is that process, the nursery: lines of JSON on standard input tell it what to
start, lines on standard output tell what was started, and what has ended and how.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from harness import ACTOR, KREX, LIMIT, process_state

PR_SET_CHILD_SUBREAPER = 36


class Remote:
    """An actor behind a socket; nothing here waits."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.connection: socket.socket | None = None
        self._buffer = b""

    def send(self, word: str, **arguments: Any) -> None:
        assert self.connection is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.sendall(json.dumps([word, arguments]).encode() + b"\n")

    def outcome(self) -> dict[str, Any] | None:
        """The next outcome, if it is there."""
        if self.connection is None:
            return None
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            self._buffer += self.connection.recv(65536)
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


class Nursery:
    """Starts actors quickly: bare ones by a fork, others by `krex run`."""

    def __init__(self, directory: str, environment: dict[str, str], stderr: Any) -> None:
        self.path = os.path.join(directory, "actors")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(64)
        self.listener.setblocking(False)
        self.remotes: dict[int, Remote] = {}
        self.ended: dict[int, int] = {}
        self._strangers: list[tuple[socket.socket, bytes]] = []
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, __file__, self.path],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def start(self, options: list[str] | None, environment: dict[str, str]) -> Remote:
        """Start an actor, bare or under `krex run OPTIONS`; it says hello later."""
        assert self._process.stdin is not None
        words = [options, environment]
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + LIMIT
        while (pid := self._read()) is None:
            assert time.monotonic() < deadline, "the nursery does not answer"
            assert self._process.poll() is None, "the nursery has ended"
            self._wait(0.1)
        return self.expect(pid)

    def expect(self, pid: int) -> Remote:
        """The actor with this id, which connects sooner or later."""
        return self.remotes.setdefault(pid, Remote(pid))

    def _wait(self, seconds: float) -> None:
        assert self._process.stdout is not None
        select.select([self._process.stdout], [], [], seconds)

    def _read(self) -> int | None:
        """Takes in what the nursery says; returns what it has started."""
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            self._buffer += os.read(self._process.stdout.fileno(), 65536)
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            kind, pid, status = json.loads(line)
            if kind == "started":
                self.ended.pop(pid, None)
                return int(pid)
            self.ended[pid] = status
        return None

    def look(self) -> None:
        """Takes in who has connected, and who has ended."""
        started = self._read()
        assert started is None, started
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self.listener.accept()
                connection.setblocking(False)
                self._strangers.append((connection, b""))
        strangers, self._strangers = self._strangers, []
        for connection, greeting in strangers:
            with contextlib.suppress(BlockingIOError, ConnectionResetError):
                greeting += connection.recv(4096)
            if b"\n" not in greeting:
                self._strangers.append((connection, greeting))
                continue
            remote = self.expect(json.loads(greeting)["value"]["pid"])
            remote.connection = connection
            remote._buffer = greeting

    def exit_status(self, pid: int) -> int | None:
        """How it has ended, if the nursery is the one to know, as subprocess has it."""
        self.look()
        return self.ended.get(pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(LIMIT)
        self._process.stdout.close()
        self.forget()
        self.listener.close()

    def forget(self) -> None:
        """Forgets all actors: they have ended."""
        for remote in self.remotes.values():
            remote.close()
        for connection, _ in self._strangers:
            connection.close()
        self.remotes.clear()
        self._strangers.clear()
        self.ended.clear()


def has_ended(pid: int) -> bool:
    return process_state(pid) in (None, "Z", "X")


def serve_nursery(path: str) -> None:
    """The nursery's life."""
    import actor

    # Orphans are waited for, too.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    buffer = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            with contextlib.suppress(ChildProcessError):
                while True:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if pid == 0:
                        break
                    say("ended", pid, os.waitstatus_to_exitcode(status))
        if 0 not in readable:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            return
        buffer += chunk
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            options, environment = json.loads(line)
            pid = os.fork()
            if pid != 0:
                say("started", pid, 0)
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(wake_read)
            os.close(wake_write)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null, 1)
            os.environ.update(environment)
            if options is None:
                actor.serve_at(path)
                return
            command = [KREX, "run", *options, "--", sys.executable, ACTOR, path]
            os.execv(KREX, command)


def say(kind: str, pid: int, status: int) -> None:
    os.write(1, json.dumps([kind, pid, status]).encode() + b"\n")


if __name__ == "__main__":
    serve_nursery(sys.argv[1])
