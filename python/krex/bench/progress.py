"""A bar on standard error, if that is a terminal."""

from __future__ import annotations

import os
import sys
import time

_BAR = 24


class Progress:
    """Shows how far a run has come; silent where nobody looks."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._stream = sys.stderr
        self._is_shown = self._stream is not None and self._stream.isatty()
        self._started = time.monotonic()
        self._first: int | None = None
        self._drawn = 0.0

    def show(self, done: int, what: str, broken: int, *, now: bool = False) -> None:
        """Draw it again, at most ten times a second."""
        moment = time.monotonic()
        if self._first is None:
            self._first = done  # of a run that was resumed
        if not self._is_shown or (moment < self._drawn + 0.1 and not now):
            return
        self._drawn = moment
        filled = _BAR * done // max(1, self._total)
        text = f"[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{self._total} {what}"
        if broken:
            text += f", {broken} broken"
        if done > self._first:
            left = (moment - self._started) / (done - self._first) * (self._total - done)
            text += f", {_duration(left)} left"
        self._write("\r" + text[: self._columns() - 1] + "\x1b[K")

    def say(self, text: str) -> None:
        """Print a line, terminal or not."""
        self.clear()
        if self._stream is not None:
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Take the bar away."""
        if self._is_shown and self._drawn:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _columns(self) -> int:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:
            columns = 0
        return columns or 80


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
