"""The command line: ``krex status``, ``doctor``, ``evict``, ``recover``, ``bench``, ``krex run``.

The native program `krex` is what a user calls; it runs commands itself and hands every other
subcommand to this module. ``python -m krex`` comes here first and hands `run` to the native
program. Exit statuses are those of timeout(1): 2 for a usage error, 125 for a failure of krex's
own, each with one line on standard error; `krex doctor` exits with 1 if it found an error,
`krex bench` with 3 if its result is inconclusive, and 1 if nobody would see it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

USAGE_ERROR = 2
OWN_FAILURE = 125

_SUBCOMMANDS = {
    "run": "run a command so that its regions exclude, and are excluded by, other commands'",
    "status": "show devices, gates, holders, queues and tenants",
    "doctor": "look for what keeps krex from working, and say how to mend it",
    "evict": "end commands by hand, such as those whose work on a GPU never ends",
    "recover": "repair by hand what killed processes left behind, and say what was done",
    "bench": "compare timings of commands that share the machine with timings of those alone",
}


class _UsageError(Exception):
    """The command line cannot be understood."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of this process) and return the exit status.

    `run` does not return: the process becomes the native program. Ctrl-C ends the process by
    SIGINT, and a reader that goes away ends it by SIGPIPE, as with other programs.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    previous = _default_sigpipe()
    try:
        return _guarded(arguments)
    except KeyboardInterrupt:
        return _die_by_sigint()
    finally:
        if previous is not None:
            signal.signal(signal.SIGPIPE, previous)


def _guarded(arguments: list[str]) -> int:
    try:
        _escape_unencodable()
        status = _dispatch(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except _UsageError as error:
        return _complain(str(error), USAGE_ERROR)
    except ValueError as error:
        if not _is_usage_error(error):
            raise
        return _complain(str(error), USAGE_ERROR)
    except OSError as error:
        _discard_stdout()
        return _complain(_describe(error), OWN_FAILURE)
    except RuntimeError as error:
        if not _is_own(error):
            raise
        return _complain(str(error), OWN_FAILURE)
    except ImportError as error:
        if error.name != "krex._krex" and "_krex" not in str(error):
            raise
        from krex._native import reinstall_command

        return _complain(
            f"the extension krex._krex cannot be loaded ({error}); "
            f"mend it with: {reinstall_command()}",
            OWN_FAILURE,
        )


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        raise _UsageError(f"a subcommand is missing: one of {', '.join(_SUBCOMMANDS)}")
    subcommand = arguments[0]
    if subcommand == "run":
        _run(arguments)
    if not subcommand.startswith("-") and subcommand not in _SUBCOMMANDS:
        raise _UsageError(_unknown(subcommand))
    try:
        parsed = _parser(subcommand).parse_args(arguments)
    except SystemExit as done:  # --help and --version have been answered
        return int(done.code or 0)
    action: Callable[[Namespace], int] = parsed.action
    return action(parsed)


def _unknown(subcommand: str) -> str:
    from difflib import get_close_matches

    message = f"unknown subcommand {subcommand!r}"
    for close in get_close_matches(subcommand, _SUBCOMMANDS, n=1):
        return f"{message}; did you mean {close!r}?"
    return f"{message}; there are {', '.join(_SUBCOMMANDS)}"


def _run(arguments: Sequence[str]) -> NoReturn:
    """Become the native program, with the signal dispositions that Python changed undone."""
    from krex._native import native_program

    program = native_program()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Python ignores these two at its start, and what is ignored stays so in the command.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(program, [program, *arguments])


def _parser(subcommand: str) -> ArgumentParser:
    import argparse

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise _UsageError(message)

    class Version(argparse.Action):
        def __call__(self, *_: object, **__: object) -> NoReturn:
            from krex import _krex

            print(f"krex {_krex.__version__}")
            raise SystemExit(0)

    parser = Parser(
        prog="krex",
        description="Let evaluation commands share a machine, except in their timed regions.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(metavar="SUBCOMMAND", required=True)

    def add(name: str, action: Callable[[Any], int]) -> Parser:
        text = _SUBCOMMANDS[name]
        subparser = subparsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        subparser.set_defaults(action=action)
        return subparser

    subparsers.add_parser("run", help=_SUBCOMMANDS["run"], add_help=False)
    for name, action in (("status", _status), ("doctor", _doctor)):
        add(name, action).add_argument("--json", action="store_true", help="print JSON")
    add("recover", _recover).add_argument(
        "--purge", action="store_true", help="also remove the runtime directory's contents"
    )
    evict = add("evict", _evict)
    evict.add_argument(
        "who", nargs="?", metavar="NAME|PID", help="a command's name or process id, as in `status`"
    )
    evict.add_argument(
        "--on-stuck",
        action="store_true",
        help="only if it is stuck; without NAME|PID: all that are stuck",
    )
    bench = add("bench", _bench)
    if subcommand == "bench":
        from krex.bench import options

        options.add_arguments(bench)
    return parser


def _status(arguments: Namespace) -> int:
    from krex import status

    status.show(as_json_text=arguments.json)
    return 0


def _doctor(arguments: Namespace) -> int:
    from krex import doctor

    return doctor.show(as_json_text=arguments.json)


def _recover(arguments: Namespace) -> int:
    from krex import _krex
    from krex._text import one_line

    done = _krex.recover(purge=arguments.purge)
    print("\n".join(one_line(line) for line in done) if done else "nothing to recover")
    return 0


def _evict(arguments: Namespace) -> int:
    from krex import evict

    if arguments.who is None and not arguments.on_stuck:
        raise _UsageError("say whom: a name or process id from `krex status`, or --on-stuck")
    return evict.run(arguments.who, only_stuck=arguments.on_stuck)


def _bench(arguments: Namespace) -> int:
    from krex.bench import options

    return options.run_bench(arguments)


def _complain(message: str, status: int) -> int:
    from krex._text import one_line

    if sys.stderr is not None:
        print(f"krex: {one_line(message)}", file=sys.stderr, flush=True)
    return status


def _describe(error: OSError) -> str:
    if error.strerror is None or error.filename is None:
        return error.strerror or str(error)
    return f"{os.fsdecode(error.filename)}: {error.strerror}"


def _is_own(error: RuntimeError) -> bool:
    from krex.errors import KrexError

    return isinstance(error, KrexError)


def _is_usage_error(error: ValueError) -> bool:
    from krex.bench.errors import BenchUsageError

    return isinstance(error, BenchUsageError)


def _default_sigpipe() -> Any:
    """Let a closed pipe end the process; return the disposition to restore, or None."""
    try:
        return signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    except ValueError:  # only the main thread may
        return None


def _die_by_sigint() -> int:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    return 128 + signal.SIGINT


def _escape_unencodable() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _discard_stdout() -> None:
    """Drop output that cannot be written, so that the interpreter does not try again at its end."""
    try:
        sys.stdout.flush()
    except (AttributeError, OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, 1)
        finally:
            os.close(null)
