"""The evaluation commands of a run: the built-in ones, or the user's from a file."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from krex.bench.errors import BenchError, BenchUsageError

#: The kinds of built-in commands; `krex.bench.suite` has what they do.
BUILT_IN_KINDS = ("memory", "compute", "launch")


@dataclass(frozen=True)
class Command:
    """An evaluation command: prints one line of JSON with `kind` and `ms`."""

    argv: tuple[str, ...]
    #: None: what the command prints.
    kind: str | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """A word for it, also if it never printed its kind."""
        return self.kind or os.path.basename(self.argv[0])

    def to_dict(self) -> dict[str, Any]:
        """As in a file of commands."""
        return {"argv": list(self.argv), "kind": self.kind, "env": dict(self.env)}


def built_in_commands() -> list[Command]:
    """Return one command per kind.

    Raises:
        BenchError: if numpy, which they use, is missing.
    """
    if importlib.util.find_spec("numpy") is None:
        raise BenchError(
            "the built-in commands need numpy, which comes with krex's extra `bench`; "
            f"get it with: {sys.executable} -m pip install numpy; "
            "or name commands of your own: --commands FILE"
        )
    return [Command(own_program("krex.bench.suite", kind), kind) for kind in BUILT_IN_KINDS]


def own_program(module: str, *words: str) -> tuple[str, ...]:
    """Return the command line that runs the function `main` of a module of krex.

    Unlike ``python -m``, it imports nothing from the current directory, where a user may well have
    a ``json.py``.
    """
    script = (
        f"import sys; sys.path = [it for it in sys.path if it]; import {module} as it; it.main()"
    )
    return (sys.executable, "-c", script, *words)


def read_commands(path: str) -> list[Command]:
    """Read a file with one command per line: ``{"argv": […], "kind": "…", "env": {…}}``.

    Raises:
        BenchUsageError: if a line is something else; the message has its number.
        OSError: if the file cannot be read.
    """
    commands = []
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    commands.append(_parse(line))
                except ValueError as error:
                    raise BenchUsageError(f"{path}:{number}: {error}") from None
    if not commands:
        raise BenchUsageError(f"{path}: no commands in it")
    return commands


def _parse(line: str) -> Command:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: too deep") from None
    if not isinstance(found, dict):
        raise ValueError('not an object like {"argv": ["python", "evaluate.py"]}')
    if unknown := sorted(set(found) - {"argv", "kind", "env"}):
        raise ValueError(f"unknown key {unknown[0]!r}; there are argv, kind, env")
    argv, kind, env = found.get("argv"), found.get("kind"), found.get("env", {})
    if not _are_words(argv) or not argv or not argv[0]:
        raise ValueError("argv is a list of words, not empty")
    if kind is not None and (not _are_words([kind]) or not kind):
        raise ValueError("kind is a word")
    if not isinstance(env, dict) or not _are_words(list(env.values())):
        raise ValueError("env is an object whose values are words")
    if bad := [name for name in env if not name or "=" in name or "\0" in name]:
        raise ValueError(f"{bad[0]!r} is no name of an environment variable")
    if bad := [it for it in (*argv, *env, *env.values()) if not _is_encodable(it)]:
        raise ValueError(f"{bad[0]!r} cannot be handed to a command in this locale's encoding")
    if kind is not None and not _is_text(kind):
        raise ValueError(f"the kind {kind!r} cannot be written in UTF-8")
    return Command(tuple(argv), kind, env)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(it, str) and "\0" not in it for it in value)


def _is_encodable(word: str) -> bool:
    try:
        os.fsencode(word)
    except ValueError:
        return False
    return True


def _is_text(word: str) -> bool:
    try:
        word.encode()
    except ValueError:
        return False
    return _is_encodable(word)
