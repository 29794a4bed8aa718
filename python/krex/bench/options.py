"""The command line of ``krex bench``."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from krex._text import one_line
from krex.bench import cuda, machine
from krex.bench.commands import Command, built_in_commands, read_commands
from krex.bench.errors import BenchUsageError
from krex.bench.policies import KREX, POLICIES, parse_policies
from krex.bench.settings import RESERVED_VARIABLE, Settings, default_count

_DEVICES = "cpu (default), cpu:NAME, or a GPU: nvidia-smi's index of it, or its UUID"
_LONGEST_TIMEOUT_S = 7 * 24 * 3600

# What changes how krex does its part; a run is not resumed under another value.
_KREX_VARIABLES = ("KREX_FREEZER", "KREX_MAX_CLOSED", RESERVED_VARIABLE)

FAILED = 125
#: Nobody would have seen the result.
UNHEARD = 1
INCONCLUSIVE = 3

_DESCRIPTION = """\
Run evaluation commands side by side under several policies, and compare their timings with those
of commands that run alone. Exit status 3: inconclusive, since the commands that ran alone do not
agree with each other. docs/method.md says how it is measured."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``krex bench``, and ``krex bench gate``."""
    parser.description = _DESCRIPTION
    parser.add_argument("--device", default="cpu", help=_DEVICES)
    parser.add_argument(
        "--policies",
        default=",".join(POLICIES),
        metavar="NAME,…",
        help=f"of: {', '.join(POLICIES)} (default: all); solo, the reference, is always run",
    )
    parser.add_argument(
        "--width", type=int, default=4, metavar="N", help="commands at once (default: 4)"
    )
    parser.add_argument(
        "--count",
        type=int,
        metavar="N",
        help="commands per policy and round (default: 12, or 3 times the width if that is more)",
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="turns per policy (default: 5)"
    )
    parser.add_argument(
        "--commands",
        metavar="FILE",
        help='commands to run instead of the built-in ones, one {"argv": […], "kind": "…", '
        '"env": {…}} per line; each prints a line of JSON with its kind and ms',
    )
    parser.add_argument(
        "--correctness-work",
        type=int,
        metavar="N",
        help="rounds in which a built-in command for a GPU checks its kernel there (default: "
        f"{cuda.DEFAULT_WORK})",
    )
    parser.add_argument(
        "--timeout", type=float, default=60, metavar="S", help="seconds per command (default: 60)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="threads per command, for OpenMP and BLAS (default: 1)",
    )
    parser.add_argument(
        "--cpus", metavar="LIST", help="CPUs that all commands share, like 0-3,8 (default: all)"
    )
    parser.add_argument(
        "--export-json", metavar="FILE", help="write all measurements, also while running"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run that --export-json's file holds"
    )
    defaults = {it: value for it, value in vars(parser.parse_args([])).items() if it != "action"}
    gate = parser.add_subparsers(metavar="[gate]").add_parser(
        "gate",
        help="measure what the gate, a region, a hand-over and a recovery cost on this machine",
        description="Measure what krex itself costs on this machine, beside other locks.",
        allow_abbrev=False,
    )
    gate.add_argument(
        "--siblings", type=int, default=7, metavar="N", help="siblings of a region (default: 7)"
    )
    gate.add_argument(
        "--repeats", type=int, default=50, metavar="N", help="regions per row (default: 50)"
    )
    gate.add_argument(
        "--export-json", metavar="FILE", dest="export_rows", help="also write the rows as JSON"
    )
    gate.set_defaults(action=partial(run_gate, defaults=defaults))


def run_gate(arguments: Namespace, defaults: Mapping[str, Any]) -> int:
    """Do what ``krex bench gate`` asks for; returns the exit status.

    `defaults` are those of the options of ``krex bench``, of which none is for this.
    """
    from krex._native import native_program
    from krex.bench import gate
    from krex.bench.directories import remove_abandoned

    for name, value in defaults.items():
        if getattr(arguments, name) != value:
            raise BenchUsageError(
                f"--{name.replace('_', '-')} before `gate` is an option of `krex bench`; "
                "those of `krex bench gate` come after it"
            )
    _between("--siblings", arguments.siblings, 0, 1000)
    _between("--repeats", arguments.repeats, 1, 1_000_000)
    remove_abandoned(native_program())
    return gate.show(arguments.siblings, arguments.repeats, arguments.export_rows)


def run_bench(arguments: Namespace) -> int:
    """Do what ``krex bench`` asks for; returns the exit status."""
    from krex.bench.results import reserved

    settings = settings_from(arguments)
    path = arguments.export_json
    if path is None:
        if arguments.resume:
            raise BenchUsageError(
                "--resume needs --export-json FILE, which says what to go on with"
            )
        if sys.stdout is None:
            print("krex: standard output is closed, and there is no --export-json", file=sys.stderr)
            return UNHEARD
        return _run(settings, None, is_resumed=False)
    with reserved(path):
        return _run(settings, path, is_resumed=arguments.resume)


def _run(settings: Settings, path: str | None, *, is_resumed: bool) -> int:
    from krex import __version__
    from krex._native import native_program
    from krex.bench import table
    from krex.bench.directories import remove_abandoned
    from krex.bench.interruption import Interruption
    from krex.bench.launch import Launcher
    from krex.bench.progress import Progress
    from krex.bench.results import Results, is_unfinished, save_or_rescue
    from krex.bench.run import run

    results = Results(settings, machine.describe(), __version__)
    progress = Progress(settings.runs())
    if path is not None and is_resumed:
        results.load(path)
    elif path is not None and is_unfinished(path):
        raise BenchUsageError(f"{path} holds an interrupted run: go on with --resume, or remove it")
    remove_abandoned(native_program())
    if KREX in settings.policies and not results.is_finished:
        with Launcher(settings) as launcher:
            launcher.try_krex()
    if not is_resumed:
        results.busy_before = round(machine.busy_share(), 3)
        if results.busy_before >= 0.05:
            progress.say(
                f"krex: other processes use {results.busy_before:.0%} of the CPUs, "
                "which disturbs all policies"
            )
    with Interruption() as interruption:
        try:
            run(results, path, interruption, progress)
        finally:
            data = results.to_dict()
            trouble = save_or_rescue(path, data) if path is not None else None
            if trouble is not None:
                progress.say(f"krex: {one_line(trouble)}")
    print("\n".join(table.lines(data)), flush=True)
    if interruption.signal is not None:
        if path is not None and trouble is None:
            where = one_line(shlex.quote(path))
            progress.say(f"krex: interrupted; go on with: --resume --export-json {where}")
        interruption.pass_on()
    if trouble is not None:
        return FAILED
    return 0 if data["is_conclusive"] else INCONCLUSIVE


def settings_from(arguments: Namespace) -> Settings:
    """Check the options.

    Raises:
        BenchUsageError: if they make no sense.
        BenchError: if numpy or torch is needed and missing.
    """
    policies = parse_policies(arguments.policies)
    device = _device(arguments.device)
    is_gpu = cuda.is_gpu(device)
    if arguments.correctness_work is not None and (arguments.commands or not is_gpu):
        raise BenchUsageError("--correctness-work is for the built-in commands for a GPU")
    for name, most in (("width", 1000), ("rounds", 1000), ("threads", 1000)):
        _between(f"--{name}", getattr(arguments, name), 1, most)
    if not 0 < arguments.timeout <= _LONGEST_TIMEOUT_S:  # NaN is not either
        raise BenchUsageError(
            f"--timeout is a number of seconds above 0, and at most {_LONGEST_TIMEOUT_S}"
        )
    allowed = os.sched_getaffinity(0)
    cpus = machine.parse_cpus(arguments.cpus, allowed) if arguments.cpus else allowed
    commands = _commands(arguments, device)
    _check_reservation(os.environ, cpus)
    for command in commands:
        _check_reservation(command.env, cpus)
    count = arguments.count
    if count is None:
        count = default_count(commands, arguments.width)
    _between("--count", count, 1, 1_000_000)
    return Settings(
        commands=tuple(commands),
        policies=policies,
        device=device,
        width=arguments.width,
        count=count,
        rounds=arguments.rounds,
        timeout=arguments.timeout,
        threads=arguments.threads,
        cpus=tuple(sorted(cpus)),
        krex={name: os.environ[name] for name in _KREX_VARIABLES if name in os.environ},
    )


def _commands(arguments: Namespace, device: str) -> list[Command]:
    if arguments.commands:
        return read_commands(arguments.commands)
    if cuda.is_gpu(device):
        return cuda.commands(device, arguments.correctness_work)
    return built_in_commands()


def _check_reservation(environment: Mapping[str, str], cpus: Collection[int]) -> None:
    """Refuse reserved CPUs that would be krex's alone, and no other policy's."""
    reserved = environment.get(RESERVED_VARIABLE, "").strip()
    if reserved in ("", "none"):
        return
    try:
        machine.parse_cpus(reserved, cpus)
    except BenchUsageError as error:
        raise BenchUsageError(
            f"{RESERVED_VARIABLE} has to be some of the CPUs that all commands share (--cpus): "
            f"{error}"
        ) from None


def _device(text: str) -> str:
    """Return krex's name for a device, and say which GPU an index means."""
    from krex import _krex
    from krex.errors import UnknownDevice

    try:
        device = _krex.resolve_device(text)
    except UnknownDevice as error:
        raise BenchUsageError(str(error)) from error
    if device != text:
        from krex.nvml import gpus

        index, name = gpus().get(device, (None, None))
        which = "" if index is None else f" (GPU {index}, {one_line(str(name))})"
        print(f"device {text} is {device}{which}", file=sys.stderr, flush=True)
    return device


def _between(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BenchUsageError(f"{option} is a number from {least} to {most}")
