"""Starting evaluation commands under a policy, and seeing to their ends."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from krex._native import interposer, native_program
from krex.bench import queueing
from krex.bench.commands import Command
from krex.bench.directories import Directory
from krex.bench.errors import BenchError, BenchUsageError
from krex.bench.marker import LOCK_VARIABLE, POLICY_VARIABLE
from krex.bench.measurement import Measurement, Outcome, Printed, read_output
from krex.bench.policies import EXCLUSIVE, KREX, POLICIES, REGION_LOCK, Policy
from krex.bench.processes import end_with_parent, kill_tree, tree
from krex.bench.settings import RESERVED_VARIABLE, Settings, Turn
from krex.errors import KrexError

# How much of a command's output is looked at: its end.
_OUTPUT_BYTES = 64 * 1024
# One that prints more is ended, before it fills the disk.
_MOST_OUTPUT_BYTES = 64 * 1024 * 1024
_TOO_MUCH = f"printed more than {_MOST_OUTPUT_BYTES >> 20} MiB"
# After SIGKILL; a process that does not go by then hangs in the kernel.
_KILL_LIMIT_S = 10.0
# A command that does nothing has ended by then.
_TRY_LIMIT_S = 30.0
# Shortest time until a command that was kept waiting is looked at again.
_LOOK_AGAIN_S = 0.05
# The size of the environment moves the stack, which can change timings: it is always the same.
_PADDING_VARIABLE = "KREX_BENCH_PADDING"
# As long as `LD_PRELOAD`.
_STAND_IN = "KREX_BENCH"
_LONGEST_NAME = max(len(name) for name in POLICIES)
_NO_CPUS = "none"
# Statuses by which what is run before a command says that it could not start it: `krex run` also
# that a setting makes no sense.
_NOT_STARTED = (2, 125, 126, 127)


def _in_place_of_interposer(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that take as much room as what `krex run` adds to an environment."""
    library = interposer()
    before = environment.get("LD_PRELOAD", "")
    if library is None or library in re.split("[ :]", before):
        return {}
    if before:
        return {_PADDING_VARIABLE: "." * len(f"{library}:")}
    return {_STAND_IN: library}


@dataclass(frozen=True)
class Job:
    """One run of one command."""

    turn: Turn
    position: int
    #: Index of the command in the run's list.
    number: int
    command: Command


class _Running:
    """A command that was started."""

    def __init__(self, job: Job, slot: int, lock: int | None) -> None:
        self.job = job
        self.slot = slot
        self.lock = lock
        self.output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.process: subprocess.Popen[bytes] | None = None
        self.pidfd: int | None = None
        #: Why it was ended before it was done.
        self.killed_for: tuple[Outcome, str] | None = None
        self.started_at = time.time()
        self.started = time.monotonic()
        self.deadline = self.started
        #: At which it is ended, even if it was kept waiting until then.
        self.latest = self.started

    def has_lock(self) -> bool:
        """Whether the lock was taken in the name of its descriptor."""
        text = Path(f"/proc/self/fdinfo/{self.lock}").read_text(encoding="ascii")
        return "FLOCK" in text

    def end_group(self) -> None:
        """End its process group."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End it, and what descends from it in whatever group."""
        if self.process is not None and self.process.returncode is None:
            kill_tree(self.process.pid)
        self.end_group()

    def printed_bytes(self) -> int:
        return sum(os.fstat(it.fileno()).st_size for it in (self.output, self.errors))

    def close(self) -> None:
        for descriptor in (self.pidfd, self.lock):
            if descriptor is not None:
                os.close(descriptor)
        self.output.close()
        self.errors.close()


class Launcher:
    """Runs commands side by side, in runtime directories that are nobody else's.

    Commands under `krex` share one; under other policies each has one of its own, so that a
    command that calls `krex.region.critical()` directly runs, and excludes nobody.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._krex = native_program()
        self._own = Directory()
        self.directory = self._own.path
        self._lock_path = self.directory / "lock"
        self._lock_path.touch(0o600)
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith("KREX_BENCH_")
        }
        self._environment.update(settings.thread_environment())
        self._running: set[_Running] = set()
        self._selector = selectors.DefaultSelector()
        self._free = list(range(settings.width))
        self._next_slot = settings.width
        self._lock_released = 0.0
        self._failed: list[Measurement] = []
        #: What could not be killed; kept, since Python warns of one that runs and is dropped.
        self._left: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def running(self) -> int:
        """How many commands run now."""
        return len(self._running)

    def try_krex(self) -> None:
        """Find out now whether `krex run` accepts the settings of all commands.

        Raises:
            BenchUsageError: if it does not, with its message.
            BenchError: if it cannot be run.
        """
        settings: list[dict[str, str]] = []
        for command in self._settings.commands:
            own = {name: it for name, it in command.env.items() if name.startswith("KREX_")}
            if own not in settings:
                settings.append(own)
        for own in settings:
            try:
                done = subprocess.run(
                    # Not `true`, which may not be there.
                    [
                        self._krex,
                        "run",
                        "--device",
                        self._settings.device,
                        "--",
                        self._krex,
                        "--version",
                    ],
                    env=self._environment
                    | own
                    | {"KREX_RUNTIME_DIR": str(self._runtime_dir(KREX, 0))},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=False,
                    start_new_session=True,
                    timeout=_TRY_LIMIT_S,
                )
            except subprocess.TimeoutExpired:
                raise BenchError(f"`krex run` did not end within {_TRY_LIMIT_S:g} s") from None
            if done.returncode != 0:
                said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
                message = f"`krex run` refuses to run: {said.removeprefix('krex: ')}"
                raise (BenchUsageError if done.returncode == 2 else BenchError)(message)

    def try_start(self, job: Job) -> bool:
        """Start a command if its policy lets it run now; one that cannot be started has ended."""
        if not self._free or (job.turn.policy.is_serial and self._running):
            return False
        lock = None
        if job.turn.policy is EXCLUSIVE:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CLOEXEC)
        running = _Running(job, self._free.pop(0), lock)
        try:
            running.process = self._start(running)
            running.pidfd = os.pidfd_open(running.process.pid)
        except (OSError, ValueError) as error:
            if running.process is not None:
                running.kill()
                running.process.wait()
            why = error.strerror if isinstance(error, OSError) else error
            failure = Printed("not started", f"{why}: {job.command.argv[0]}")
            self._failed.append(_measurement(running, failure))
            self._free.append(running.slot)
            running.close()
            return True
        running.deadline = running.latest = running.started + self._settings.timeout
        if job.turn.policy in (EXCLUSIVE, KREX):
            running.latest += (self._settings.timeout + 10) * self._settings.width
        self._running.add(running)
        self._selector.register(running.pidfd, selectors.EVENT_READ, running)
        return True

    def _start(self, running: _Running) -> subprocess.Popen[bytes]:
        policy, command = running.job.turn.policy, running.job.command
        argv = list(command.argv)
        if policy is KREX:
            # A program's name may be no text, and empty.
            name = command.name.encode(errors="backslashreplace").decode() or "command"
            options = ["--device", self._settings.device, "--name", name]
            argv = [self._krex, "run", *options, "--", *argv]
        elif policy is EXCLUSIVE:
            argv = [sys.executable, "-I", "-S", queueing.__file__, str(running.lock), *argv]
        return subprocess.Popen(
            argv,
            env=self._environment_of(running),
            stdin=subprocess.DEVNULL,
            # Files, since nobody has to read them meanwhile, and a process left behind that
            # keeps them open keeps nobody waiting.
            stdout=running.output,
            stderr=running.errors,
            start_new_session=True,  # Ctrl-C is the bench's, which ends its commands itself
            preexec_fn=end_with_parent(),
            pass_fds=() if running.lock is None else (running.lock,),
        )

    def _environment_of(self, running: _Running) -> dict[str, str]:
        policy = running.job.turn.policy
        environment = self._environment | running.job.command.env
        spare = _LONGEST_NAME - len(policy.name)
        reserved = environment.get(RESERVED_VARIABLE)
        if reserved is not None:
            # Else a command that calls `krex.region.critical()` itself would have these CPUs for
            # its regions under other policies, too.
            value = reserved if policy is KREX else _NO_CPUS
            environment[RESERVED_VARIABLE] = value
            spare += len(reserved) + len(_NO_CPUS) - len(value)
        if policy is not KREX:
            environment |= _in_place_of_interposer(environment)
        return environment | {
            POLICY_VARIABLE: policy.name,
            LOCK_VARIABLE: str(self._lock_path),
            _PADDING_VARIABLE: environment.get(_PADDING_VARIABLE, "") + "." * spare,
            "KREX_RUNTIME_DIR": str(self._runtime_dir(policy, running.slot)),
        }

    def _runtime_dir(self, policy: Policy, slot: int) -> Path:
        # Of the same length, too.
        directory = self.directory / ("krex" if policy is KREX else f"{slot:04}")
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory

    def _kept_waiting(self, running: _Running) -> float:
        """Return the seconds for which a command could not run, by its policy."""
        policy = running.job.turn.policy
        if policy is EXCLUSIVE:
            # Nobody who runs now had the lock before it was released.
            until = self._lock_released if running.has_lock() else time.monotonic()
            return max(0.0, until - running.started)
        if policy is KREX and running.process is not None:
            from krex import snapshot

            family = tree(running.process.pid)
            with contextlib.suppress(KrexError, OSError):
                tenants = snapshot(str(self.directory / "krex"))["tenants"]
                # What one of them was kept from, the command as a whole was.
                return max((it["excluded_s"] for it in tenants if it["pid"] in family), default=0.0)
        return 0.0

    def wait(self, seconds: float) -> list[Measurement]:
        """Wait until a command has ended, so long at most; return what came of those that have."""
        ended, self._failed = self._failed, []
        if ended or not self._running:
            return ended
        now = time.monotonic()
        soonest = min(it.deadline for it in self._running)
        ended += self._finish_all(max(0.0, min(seconds, soonest - now)))
        if any(time.monotonic() >= it.deadline for it in self._running):
            # Nobody is ended for a limit that has ended by itself: this process may have been
            # stopped meanwhile.
            ended += self._finish_all(0)
        for running in list(self._running):
            if time.monotonic() >= running.deadline:
                if running.killed_for is not None:
                    ended.append(self._leave_behind(running))
                elif not self._has_time_left(running):
                    self._kill_for(running, "timed out", self._too_late)
            elif running.killed_for is None and running.printed_bytes() > _MOST_OUTPUT_BYTES:
                self._kill_for(running, "bad result", _TOO_MUCH)
        return ended

    def _finish_all(self, seconds: float) -> list[Measurement]:
        return [self._finish(key.data) for key, _ in self._selector.select(seconds)]

    def _has_time_left(self, running: _Running) -> bool:
        """Whether it was kept waiting, and so has time left; then its deadline is put off."""
        now = time.monotonic()
        deadline = running.started + self._settings.timeout + self._kept_waiting(running)
        running.deadline = min(running.latest, max(deadline, now + _LOOK_AGAIN_S))
        return deadline > now and running.deadline > now

    def _kill_for(self, running: _Running, outcome: Outcome, detail: str) -> None:
        running.killed_for = (outcome, detail)
        running.deadline = time.monotonic() + _KILL_LIMIT_S
        running.kill()

    def _leave_behind(self, running: _Running) -> Measurement:
        """Go on without a process that SIGKILL does not end, since it hangs in the kernel."""
        assert running.process is not None
        assert running.killed_for is not None
        outcome, detail = running.killed_for
        detail += f"; process {running.process.pid} cannot be killed and was left behind"
        self._left.append(running.process)
        measurement = _measurement(running, Printed(outcome, detail), time.time())
        # Its runtime directory stays its own.
        running.slot, self._next_slot = self._next_slot, self._next_slot + 1
        self._forget(running)
        return measurement

    @property
    def _too_late(self) -> str:
        return f"not done after {self._settings.timeout:g} s"

    def _finish(self, running: _Running) -> Measurement:
        ended_at = time.time()
        assert running.process is not None
        # Before it is reaped, so that the group's number is still its own: what it left running
        # would disturb the others.
        running.end_group()
        running.process.wait()
        kind = running.job.command.kind
        printed = read_output(_tail(running.output), kind)
        outcome, detail = self._judge(running)
        if outcome is not None:
            printed = Printed(outcome, detail, printed.kind)
        measurement = _measurement(running, printed, ended_at)
        self._forget(running)
        return measurement

    def _judge(self, running: _Running) -> tuple[Outcome | None, str]:
        """Return what went wrong, judging by how it ended."""
        assert running.process is not None
        status = running.process.returncode
        if running.killed_for is not None:
            return running.killed_for
        if running.printed_bytes() > _MOST_OUTPUT_BYTES:
            return "bad result", _TOO_MUCH
        if status == 0:
            return None, ""
        last = _tail(running.errors).strip().rpartition("\n")[2].strip()[:300]
        is_started_by_other = running.job.turn.policy in (EXCLUSIVE, KREX)
        if is_started_by_other and status in _NOT_STARTED and last.startswith("krex: "):
            return "not started", last
        how = f"exit status {status}" if status > 0 else f"ended by {_signal_name(-status)}"
        return "crashed", f"{how}: {last}" if last else how

    def _forget(self, running: _Running) -> None:
        self._selector.unregister(running.pidfd)  # type: ignore[arg-type]
        self._running.discard(running)
        self._free.append(running.slot)
        if running.lock is not None and running.has_lock():
            self._lock_released = time.monotonic()
        running.close()

    def regions_so_far(self, policy: Policy) -> int | None:
        """How many regions commands have marked under a policy; None if it cannot be told."""
        if policy is REGION_LOCK:
            return self._lock_path.stat().st_size
        directory = self.directory / "krex"
        if policy is not KREX:
            return None
        if not (directory / "segment").exists():
            return 0
        from krex import snapshot

        devices: list[dict[str, Any]] = snapshot(str(directory))["devices"]
        return sum(int(it["epoch"]) for it in devices if it["name"] == self._settings.device)

    def kill_all(self) -> None:
        """End all commands; nothing is measured of them."""
        for running in self._running:
            running.kill()
        deadline = time.monotonic() + _KILL_LIMIT_S
        for running in list(self._running):
            assert running.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.process.wait(max(0.0, deadline - time.monotonic()))
            self._forget(running)

    def close(self) -> None:
        """End all commands, take krex out of the runtime directories, and remove them."""
        self.kill_all()
        self._selector.close()
        self._own.remove(self._krex)


def _measurement(running: _Running, printed: Printed, ended_at: float | None = None) -> Measurement:
    job = running.job
    status = None if running.process is None else running.process.returncode
    return Measurement(
        policy=job.turn.policy.name,
        round=job.turn.round,
        position=job.position,
        command=job.number,
        kind=printed.kind or job.command.name,
        outcome=printed.outcome,
        detail=printed.detail,
        ms=printed.ms,
        verdict=printed.verdict,
        reasons=printed.reasons,
        started_at=running.started_at,
        ended_at=running.started_at if ended_at is None else ended_at,
        exit_status=status if status is not None and status >= 0 else None,
        signal=-status if status is not None and status < 0 else None,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _OUTPUT_BYTES))
    return file.read().decode("utf-8", "replace")
