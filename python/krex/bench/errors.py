"""What goes wrong with a bench as a whole; a command that goes wrong is counted instead."""

from __future__ import annotations

from krex.errors import KrexError


class BenchUsageError(ValueError):
    """The bench was asked for something that makes no sense; the message says what would."""


class BenchError(KrexError):
    """The bench cannot be run here."""
