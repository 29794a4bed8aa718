"""Real processes that tests drive: actors, commands under `krex run`, and what is left of them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Generous: these bound what hangs, they measure nothing.
LIMIT = float(os.environ.get("KREX_TEST_LIMIT", "60"))

KREX = os.path.join(sysconfig.get_path("scripts"), "krex")
ACTOR = str(Path(__file__).with_name("actor.py"))


def wait_until(predicate: Callable[[], T], what: str = "", limit: float = LIMIT) -> T:
    """Wait until `predicate` returns something true, and return it."""
    deadline = time.monotonic() + limit
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {limit} s: {what or predicate}")
        time.sleep(0.005)


def process_state(pid: int) -> str | None:
    """The letter of /proc/PID/stat; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_running(pid: int) -> bool:
    return process_state(pid) not in (None, "Z", "X")


def cgroup_of(pid: int) -> str | None:
    """The path of a process's cgroup of version 2."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:
            lines = [line[3:].strip() for line in file if line.startswith("0::")]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return lines[0] if lines else None


def cgroup_mount() -> Path:
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            if after.split()[0] == "cgroup2":
                return Path(before.split()[4])
    raise AssertionError("cgroup v2 is not mounted")


def is_frozen(pid: int) -> bool:
    """Whether the process is stopped, or in a frozen cgroup of krex's."""
    if process_state(pid) in ("T", "t"):
        return True
    path = cgroup_of(pid)
    if not path or not path.rpartition("/")[2].startswith("krex-"):
        return False
    try:
        events = (cgroup_mount() / path.lstrip("/") / "cgroup.events").read_text()
    except OSError:  # the group was removed, before or after it was opened
        return False
    return "frozen 1" in events


def fnv(data: bytes) -> int:
    """FNV-1a, 64 bits: names of cgroups hold 32 of them, of the runtime directory."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


class Actor:
    """A process that does what it is told, one word at a time: see actor.py."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._buffer = b""
        self.hello = self.answer()
        self.pid: int = self.hello["pid"]

    def send(self, word: str, **arguments: Any) -> None:
        """Tell it to do something; `answer` waits for the outcome."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([word, arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, limit: float = LIMIT) -> Any:
        """Wait for the next outcome. An exception over there is one here, by name."""
        outcome = self.poll_answer(limit)
        if outcome is None:
            raise AssertionError(f"no answer from {self.process.args!r} within {limit} s")
        if "error" in outcome:
            raise ActorError(outcome["error"], outcome["message"])
        return outcome["value"]

    def poll_answer(self, limit: float = 0.0) -> dict[str, Any] | None:
        """The next outcome if it comes within `limit` seconds, else None."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(self.process.stdout.fileno(), 65536)
                if not chunk:
                    status = self.process.wait(LIMIT)
                    raise EOFError(f"{self.process.args!r} ended with {status}")
                self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        outcome: dict[str, Any] = json.loads(line)
        return outcome

    def do(self, word: str, limit: float = LIMIT, **arguments: Any) -> Any:
        self.send(word, **arguments)
        return self.answer(limit)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.process.wait(LIMIT)

    def call(self, function: str, **arguments: Any) -> Any:
        """Run a function of cases.py over there; a failure has its traceback."""
        return self.do("call", function=function, arguments=arguments)

    def quit(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(LIMIT)


class ActorError(Exception):
    """What an actor raised: (class name, message)."""

    @property
    def kind(self) -> str:
        return str(self.args[0])

    @property
    def message(self) -> str:
        return str(self.args[1])


class Machine:
    """A runtime directory of its own, and all processes that a test starts with it."""

    def __init__(self, freezer: str = "auto") -> None:
        self.freezer = freezer
        self.runtime_dir = Path(tempfile.mkdtemp(prefix="krex-test-", dir="/dev/shm"))
        self.environment = dict(
            os.environ, KREX_RUNTIME_DIR=str(self.runtime_dir), KREX_FREEZER=freezer
        )
        for name in ("KREX_FAULT", "KREX_LOG"):
            self.environment.pop(name, None)
        self.processes: list[subprocess.Popen[Any]] = []
        self.pids: set[int] = set()
        self._groups_before = set(self.groups())

    def groups(self) -> list[Path]:
        """This runtime directory's cgroups, beside this process's."""
        own = cgroup_of(os.getpid()) or "/"
        directory = cgroup_mount() / own.lstrip("/")
        pattern = f"krex-{fnv(os.fsencode(self.runtime_dir)) & 0xFFFFFFFF:08x}*"
        return [path for path in directory.glob(pattern) if path.is_dir()]

    def start(
        self, command: Sequence[str | Path], env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process that is ended with the test."""
        environment = dict(self.environment, **(env or {}))
        process = subprocess.Popen([str(it) for it in command], env=environment, **options)
        self.processes.append(process)
        return process

    def run(
        self, command: Sequence[str | Path], env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, with its output as text."""
        options.setdefault("timeout", LIMIT)
        options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run(
            [str(it) for it in command],
            env=dict(self.environment, **(env or {})),
            capture_output=True,
            text=True,
            check=False,
            **options,
        )

    def krex(self, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run `krex WORDS…` to its end."""
        return self.run([KREX, *words], **options)

    def own_groups(self) -> list[Path]:
        """Cgroups of this runtime directory, beside this process's."""
        digest = 0xCBF29CE484222325  # FNV-1a, as `tenant::group_prefix` has it
        for byte in os.fsencode(self.runtime_dir):
            digest = (digest ^ byte) * 0x100000001B3 % 2**64
        prefix = f"krex-{digest % 2**32:08x}"
        return [path for path in self.groups() if path.name.startswith(prefix)]

    def supervisor_processes(self) -> list[int]:
        """Both halves of every pair of this runtime directory, whatever the segment says."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if b"__supervise" in words and os.fsencode(self.runtime_dir) in words:
                        found.append(int(entry.name))
        return sorted(found)

    def signal_supervisor(self, number: int) -> None:
        """Signal both halves of the pair, the worker first."""
        for pid in reversed(self.supervisor_processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop_supervisor(self) -> None:
        """SIGSTOP both halves of the pair, in such a way that neither replaces the other."""
        # The keeper first: it kills a worker that was stopped; a worker looks once a second.
        pids = self.supervisor_processes()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: all(process_state(pid) == "T" for pid in pids), "the pair is stopped")

    def kill_supervisor(self) -> None:
        """SIGKILL both halves of the pair, in such a way that neither takes over."""
        while pids := self.supervisor_processes():
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:  # The keeper first: it starts other workers.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

    def actor(
        self,
        *options: str,
        bare: bool = False,
        env: dict[str, str] | None = None,
        wrapper: Sequence[str] = (),
    ) -> Actor:
        """Start an actor under `krex run OPTIONS`, or bare."""
        launcher = [] if bare else [KREX, "run", *options, "--"]
        process = self.start(
            [*wrapper, *launcher, sys.executable, ACTOR],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        actor = Actor(process)
        self.pids.add(actor.pid)
        return actor

    def status(self) -> dict[str, Any]:
        import krex

        return krex.snapshot(str(self.runtime_dir))

    def device(self, name: str = "cpu") -> dict[str, Any]:
        devices = {it["name"]: it for it in self.status()["devices"]}
        return devices.get(name, {"phase": "open", "epoch": 0, "holder": None, "queue": []})

    def tenants(self) -> dict[int, dict[str, Any]]:
        """Tenants by process id."""
        return {it["pid"]: it for it in self.status()["tenants"]}

    def supervisor(self) -> dict[str, Any]:
        """The supervisor of this PID namespace that is alive."""
        alive = [it for it in self.status()["supervisors"] if it["alive"]]
        assert alive, "no supervisor is alive"
        supervisor: dict[str, Any] = alive[0]
        return supervisor

    def nobody_is_frozen(self) -> bool:
        frozen = [it for it in self.status()["tenants"] if it["frozen"]]
        return not frozen and not any(is_frozen(pid) for pid in self.pids if is_running(pid))

    def close(self) -> None:
        """End everything; then nothing may be frozen, registered, or left in the cgroups."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
            process.wait(LIMIT)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            # Slots and groups are given back without anybody asking for it.
            if (self.runtime_dir / "segment").exists() and self._segment_is_sound():
                self._wait_for_supervisors()
                wait_until(lambda: set(self.groups()) <= self._groups_before, "cgroups are removed")
        finally:
            self.krex("recover", "--purge")
            shutil.rmtree(self.runtime_dir, ignore_errors=True)

    def _segment_is_sound(self) -> bool:
        import krex

        try:
            self.status()
        except krex.SegmentError:
            return False
        return True

    def _wait_for_supervisors(self) -> None:
        if any(it["alive"] for it in self.status()["supervisors"]):
            wait_until(lambda: not self.status()["tenants"], "slots are given back")
