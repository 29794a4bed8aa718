"""A run: turn by turn, command by command, with everything kept as it comes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from krex.bench.interruption import Interruption
from krex.bench.launch import Job, Launcher
from krex.bench.machine import OthersUse
from krex.bench.progress import Progress
from krex.bench.results import Results, save
from krex.bench.settings import Settings, Turn

# Longest sleep without a look at signals.
_LOOK_S = 0.1
# The file is written again after each turn, when no command runs that this could disturb; within
# a long one at most so often.
_SAVE_S = 30.0
# Nothing between two looks takes longer, unless somebody has stopped this process, as Ctrl-Z does.
_STOPPED_S = 1.0


def run(results: Results, path: str | None, interruption: Interruption, progress: Progress) -> None:
    """Run what `results` still lacks; ends early if interrupted.

    Meanwhile `path` is written now and then, as far as that is possible; the caller writes it at
    the end.

    Raises:
        OSError: if something that commands need, such as a temporary file, cannot be made.
    """
    Run(results, path, interruption, progress).run()


class Run:
    """A run that is going on."""

    def __init__(
        self, results: Results, path: str | None, interruption: Interruption, progress: Progress
    ) -> None:
        self._results = results
        self._settings: Settings = results.settings
        self._path = path
        self._interruption = interruption
        self._progress = progress
        self._saved = time.monotonic()

    def run(self) -> None:
        """Run all turns that are not done."""
        allowed = os.sched_getaffinity(0)
        try:
            os.sched_setaffinity(0, self._settings.cpus)  # the commands inherit it
            with Launcher(self._settings) as launcher:
                for number, turn in enumerate(self._settings.turns()):
                    if self._interruption.signal is None:
                        self._run_turn(launcher, turn, self._jobs(turn, number))
        finally:
            os.sched_setaffinity(0, allowed)
            self._progress.clear()

    def _jobs(self, turn: Turn, number: int) -> Iterator[Job]:
        """What a turn still has to run: all commands alike, another one first in each turn."""
        commands = self._settings.commands
        done = self._results.done(turn)
        for position in range(self._settings.count):
            if position not in done:
                index = (position + number) % len(commands)
                yield Job(turn, position, index, commands[index])

    def _run_turn(self, launcher: Launcher, turn: Turn, jobs: Iterator[Job]) -> None:
        waiting = next(jobs, None)
        if waiting is None:
            return
        result = self._results.turn(turn)
        seconds, regions, others_s = result.seconds, result.regions or 0, result.others_s
        stopped_s = result.stopped_s
        others = OthersUse(self._settings.cpus)
        regions_before = launcher.regions_so_far(turn.policy)
        started = time.monotonic()
        pauses = _Pauses()
        ended = 0
        killed = False
        self._show(turn, now=True)
        while waiting is not None or launcher.running:
            if self._interruption.signal is not None:
                killed = launcher.running > 0
                launcher.kill_all()
                break
            while waiting is not None and launcher.try_start(waiting):
                waiting = next(jobs, None)
                pauses.look()
            measurements = launcher.wait(_LOOK_S)
            pauses.look()
            for measurement in measurements:
                self._results.measurements.append(measurement)
                ended += 1
                result.seconds = seconds + time.monotonic() - started - pauses.total_s
                result.stopped_s = stopped_s + pauses.total_s
            self._show(turn)
            if time.monotonic() > self._saved + _SAVE_S:
                self._save()
                pauses.skip()
        result.others_s = others_s + others.seconds()
        if regions_before is not None:
            marked = (launcher.regions_so_far(turn.policy) or 0) - regions_before
            # Those of killed commands will be marked again, and nobody knows how many they are.
            result.regions = regions + (min(marked, ended) if killed else marked)
        self._save()

    def _show(self, turn: Turn, *, now: bool = False) -> None:
        measurements = self._results.measurements
        broken = sum(it.outcome != "ok" for it in measurements)
        rounds = max(turn.round, self._settings.rounds)
        what = f"{turn.policy.name}, round {turn.round} of {rounds}"
        self._progress.show(len(measurements), what, broken, now=now)

    def _save(self) -> None:
        self._saved = time.monotonic()
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError):
                save(self._path, self._results.to_dict())


class _Pauses:
    """Notices when this process was stopped, by the time between two looks."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self._looked = time.monotonic()

    def look(self) -> None:
        now = time.monotonic()
        if now > self._looked + _STOPPED_S:
            self.total_s += now - self._looked
        self._looked = now

    def skip(self) -> None:
        """Leave out what may have taken long."""
        self._looked = time.monotonic()
