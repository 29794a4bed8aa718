"""All measurements of a run: kept in a file while it goes on, and read again to resume it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from krex.bench import groups, summary
from krex.bench.errors import BenchUsageError
from krex.bench.measurement import Measurement, integer, number
from krex.bench.settings import Settings, Turn

FORMAT = 1
# A run on another machine or of another krex cannot go on with these numbers.
_SAME_MACHINE = ("cpu", "cores", "kernel", "python")
# What a file may say of times, in seconds, so that whatever is made of them is finite.
_SHORTEST_TURN_S, _LONGEST_S, _LATEST = 1e-6, 1e9, 1e12


@dataclass
class TurnResult:
    """How a turn went, as far as it has come."""

    #: From its beginning to the end of the command that ended last.
    seconds: float = 0.0
    #: How many regions commands have marked; None if the policy does not tell.
    regions: int | None = None
    #: CPU seconds that processes outside of the run used of its CPUs meanwhile.
    others_s: float = 0.0
    #: Seconds in which the bench was stopped itself; they are not in `seconds`.
    stopped_s: float = 0.0


@dataclass
class Results:
    """What a run has measured so far."""

    settings: Settings
    machine: dict[str, Any]
    version: str
    started_at: float = field(default_factory=time.time)
    #: The share of the CPUs that others used before the start.
    busy_before: float = 0.0
    measurements: list[Measurement] = field(default_factory=list)
    turns: dict[tuple[str, int], TurnResult] = field(default_factory=dict)

    def turn(self, turn: Turn) -> TurnResult:
        """Return how a turn went so far."""
        return self.turns.setdefault((turn.policy.name, turn.round), TurnResult())

    def done(self, turn: Turn) -> set[int]:
        """Return the positions in a turn whose commands have ended."""
        return {
            it.position
            for it in self.measurements
            if (it.policy, it.round) == (turn.policy.name, turn.round)
        }

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to run."""
        return len(self.measurements) >= self.settings.runs()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with every measurement, and the summary of each policy."""
        found = summary.summarise(self.measurements, self.settings, self.turn_sums())
        for entry in found.policies:
            entry["measurements"] = [
                it.to_dict() | {"inflation": found.inflation(it)}
                for it in self.measurements
                if it.policy == entry["policy"]
            ]
        return {
            "format": FORMAT,
            "krex_version": self.version,
            "machine": self.machine,
            "busy_before": self.busy_before,
            "started_at": self.started_at,
            "is_finished": self.is_finished,
            "settings": self.settings.to_dict(),
            "is_conclusive": not found.doubts,
            "inconclusive_because": found.doubts,
            "references": found.references,
            "policies": found.policies,
            "groups": groups.summarise(found.policies, found.references, self.settings.device),
            "turns": [
                {"policy": policy, "round": number, **vars(result)}
                for (policy, number), result in self.turns.items()
            ],
        }

    def turn_sums(self) -> dict[str, TurnResult]:
        """Return the turns of each policy, added up."""
        sums: dict[str, TurnResult] = {}
        for (policy, _), result in self.turns.items():
            total = sums.setdefault(policy, TurnResult())
            total.seconds += result.seconds
            total.others_s += result.others_s
            total.stopped_s += result.stopped_s
            if result.regions is not None:
                total.regions = (total.regions or 0) + result.regions
        return sums

    def load(self, path: str) -> None:
        """Go on with the measurements in a file.

        Raises:
            BenchUsageError: if it is not such a file, or was measured under other conditions.
            OSError: if it cannot be read.
        """
        with _complaints_about(path):
            found = _read(path)
            if found["format"] != FORMAT:
                raise BenchUsageError(f"{path} has format {found['format']!r}, not {FORMAT}")
            self._refuse_other_conditions(path, found)
            self.started_at = number(found["started_at"], 0, _LATEST)
            self.busy_before = number(found["busy_before"], 0, 1)
            self.turns = self._turns_of(found["turns"])
            measurements = [
                Measurement.from_dict(it)
                for entry in found["policies"]
                for it in entry["measurements"]
            ]
            self._refuse_unplanned(measurements)
            self.measurements = sorted(measurements, key=lambda it: it.ended_at)

    def _turns_of(self, found: list[dict[str, Any]]) -> dict[tuple[str, int], TurnResult]:
        planned = {(it.policy.name, it.round) for it in self.settings.turns()}
        turns = {}
        for it in found:
            key = (it["policy"], it["round"])
            if key not in planned or key in turns:
                raise ValueError(f"the turn {key} was not planned, or is there twice")
            # A turn in which nothing has ended yet has taken no time.
            least = _SHORTEST_TURN_S if it["seconds"] else 0
            regions = it["regions"]
            turns[key] = TurnResult(
                seconds=number(it["seconds"], least, _LONGEST_S),
                regions=None if regions is None else integer(regions, 0, 2**63),
                others_s=number(it["others_s"], 0, _LONGEST_S),
                stopped_s=number(it["stopped_s"], 0, _LONGEST_S),
            )
        return turns

    def _refuse_unplanned(self, measurements: list[Measurement]) -> None:
        places = set()
        for it in measurements:
            place = (it.policy, it.round, it.position)
            is_planned = (
                place[:2] in self.turns
                and it.position < self.settings.count
                and it.command < len(self.settings.commands)
            )
            if not is_planned or place in places:
                raise ValueError(f"the measurement {place} was not planned, or is there twice")
            places.add(place)

    def _refuse_other_conditions(self, path: str, found: dict[str, Any]) -> None:
        # `krex` alone is a key of the settings, too.
        now: dict[str, Any] = {"krex_version": self.version, **self.settings.to_dict()}
        then = {"krex_version": found["krex_version"], **found["settings"]}
        for name in _SAME_MACHINE:
            now[name], then[name] = self.machine[name], found["machine"][name]
        for name, value in now.items():
            if then[name] != value:
                raise BenchUsageError(
                    f"{path} was measured under other conditions: "
                    f"{name} was {_short(then[name])} and is {_short(value)}"
                )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else "something else"


@contextlib.contextmanager
def _complaints_about(path: str) -> Iterator[None]:
    try:
        yield
    except BenchUsageError:
        raise
    except (AttributeError, KeyError, TypeError):
        raise BenchUsageError(f"{path} is not a file of `krex bench --export-json`") from None
    except (ValueError, RecursionError) as error:
        raise BenchUsageError(
            f"{path} is not a file of `krex bench --export-json`, or was changed: {error}"
        ) from None


def _read(path: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no number")

    with open(path, encoding="utf-8") as file:
        return json.load(file, parse_constant=refuse)


def is_unfinished(path: str) -> bool:
    """Return whether a file holds a run that was interrupted."""
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("is_finished") is False


@contextlib.contextmanager
def reserved(path: str) -> Iterator[None]:
    """Keep `path` for this process, and find out now whether `save` will be able to write to it.

    Raises:
        BenchUsageError: if something else than a file is there, such as a directory or a device,
            or if another bench writes to it.
        OSError: if nothing can be written there.
    """
    if not path:
        raise BenchUsageError("--export-json needs the name of a file")
    if os.path.exists(path) and not os.path.isfile(path):
        raise BenchUsageError(f"{path} is not a file, so it cannot be replaced by one")
    # Not `path` itself, which is replaced by each `save`.
    beside = f"{os.path.realpath(path)}.lock"
    try:
        lock = _lock(beside)
    except OSError as error:
        error.filename = path  # the one that the user knows
        raise
    if lock is None:
        raise BenchUsageError(f"another krex bench writes to {path}")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        os.close(lock)


def _lock(path: str) -> int | None:
    """Return a descriptor that locks a file, made for this; None if it is locked already."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one that had it may have removed it just before.
            if os.path.samestat(os.fstat(lock), os.lstat(path)):
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def save(path: str, data: dict[str, Any]) -> None:
    """Write JSON in such a way that the file is always whole: the old one or the new one.

    Raises:
        OSError: if it cannot be written.
        ValueError: if it has a number that JSON has not, such as infinity.
    """
    temporary = _temporary(path)
    with _or_remove(temporary):
        with open(temporary, "w", encoding="utf-8") as file:
            _write(data, file)
        os.replace(temporary, os.path.realpath(path))


def save_or_rescue(path: str, data: dict[str, Any]) -> str | None:
    """Write JSON to `path`, or, if that is impossible by now, to a file elsewhere.

    Returns what is to be told in that case: why, and where the file is.
    """
    try:
        save(path, data)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        return f"cannot write {path}: {why}; {_rescue(data)}"
    return None


def _rescue(data: dict[str, Any]) -> str:
    for directory in (tempfile.gettempdir(), "/dev/shm", os.path.expanduser("~")):
        try:
            descriptor, path = tempfile.mkstemp(".json", "krex-results-", directory)
        except OSError:
            continue
        with contextlib.suppress(OSError, ValueError), _or_remove(path):
            with open(descriptor, "w", encoding="utf-8") as file:
                _write(data, file)
            return f"what was measured is in {path}"
    return "nor anything elsewhere: what was measured is lost"


def _write(data: dict[str, Any], file: IO[str]) -> None:
    json.dump(data, file, indent=1, allow_nan=False)
    file.write("\n")


def _temporary(path: str) -> str:
    # In the directory where the file itself will be, also behind a symbolic link.
    return f"{os.path.realpath(path)}.{os.getpid()}.tmp"


@contextlib.contextmanager
def _or_remove(path: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
