"""The command line: usage errors, exit statuses, signals, and what `status` prints."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from krex import _native, status
from krex._text import printable, table

KREX = [sys.executable, "-m", "krex"]


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="krex-test-", dir="/dev/shm"))
    monkeypatch.setenv("KREX_RUNTIME_DIR", str(directory))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def krex(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KREX, *arguments], capture_output=True, text=True, timeout=60, **options
    )


# Usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "a subcommand is missing: one of run, status, doctor, evict, recover, bench"),
        (["statsu"], "unknown subcommand 'statsu'; did you mean 'status'?"),
        (
            ["x\ny"],
            "unknown subcommand 'x\\ny'; there are run, status, doctor, evict, recover, bench",
        ),
        (["status", "--jsno"], "unrecognized arguments: --jsno"),
        (["status", "a\nb"], "unrecognized arguments: a\\nb"),
        (["recover", "--pur"], "unrecognized arguments: --pur"),
    ],
)
def test_a_usage_error_is_one_line_and_status_2(arguments: list[str], message: str) -> None:
    done = krex(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"krex: {message}\n")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["doctor", "--help"]])
def test_help_goes_to_standard_output(arguments: list[str]) -> None:
    done = krex(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: krex ")


def test_help_names_every_subcommand() -> None:
    shown = krex("--help").stdout
    for subcommand in ("run", "status", "doctor", "recover"):
        assert re.search(rf"^    {subcommand} ", shown, re.MULTILINE)


def test_the_version_is_the_native_programs() -> None:
    done = krex("--version")
    native = subprocess.run(
        [_native.native_program(), "--version"], capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"krex \d+\.\d+\.\d+\S*\n", done.stdout)
    assert (done.returncode, done.stdout) == (0, native.stdout)


def test_the_command_line_loads_nothing_heavy() -> None:
    code = (
        "import krex.cli, sys\n"
        "heavy = {'argparse', 'json', 'dataclasses', 'importlib.metadata', 'inspect'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _with_path(code)], **CAPTURE)
    assert (done.stdout, done.stderr) == ("[]\n", "")


CAPTURE: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}


def _with_path(code: str) -> str:
    return f"import sys; sys.path[:0] = {[path for path in sys.path if path]!r}\n{code}"


# Failures and signals


def test_output_that_cannot_be_written_is_a_failure_of_krexs() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*KREX, "doctor"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (125, "krex: No space left on device\n")


def test_a_closed_standard_output_is_no_traceback() -> None:
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *KREX, "doctor"], **CAPTURE)
    assert done.returncode in (0, 1)
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", [["doctor"], ["--help"]])
def test_a_reader_that_went_away_ends_it_by_sigpipe(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(
            [*KREX, *arguments], stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_ctrl_c_ends_it_by_sigint() -> None:
    reader, writer = os.pipe()
    size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096) if hasattr(fcntl, "F_SETPIPE_SZ") else 0
    os.write(writer, b"x" * (size or 65536))  # so that its output blocks
    process = subprocess.Popen([*KREX, "doctor"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    deadline = time.monotonic() + 30
    while "pipe_write" not in Path(f"/proc/{process.pid}/wchan").read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    os.close(reader)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


def test_a_corrupted_segment_is_a_failure_of_krexs(runtime_dir: Path) -> None:
    segment = runtime_dir / "segment"
    segment.write_bytes(b"something else".ljust(4096))
    segment.chmod(0o600)
    done = krex("status")
    assert (done.returncode, done.stdout) == (125, "")
    assert re.fullmatch(r"krex: .*segment.*\n", done.stderr)


# run


def test_run_becomes_the_native_program() -> None:
    done = krex("run", "--", "sh", "-c", "echo $PPID; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{os.getpid()}\n", "")


def test_run_undoes_pythons_signal_dispositions() -> None:
    done = krex("run", "--", "cat", "/proc/self/status")
    match = re.search(r"^SigIgn:\s*([0-9a-f]+)$", done.stdout, re.MULTILINE)
    assert match is not None
    ignored = int(match[1], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not ignored & 1 << (number - 1)


@pytest.mark.parametrize(("command", "expected"), [("/no/such", 127), ("/", 126)])
def test_run_passes_the_native_programs_status_on(command: str, expected: int) -> None:
    assert krex("run", "--", command).returncode == expected


def test_the_native_program_hands_the_rest_to_python() -> None:
    done = subprocess.run([_native.native_program(), "statsu"], **CAPTURE)
    assert (done.returncode, done.stderr) == (
        2,
        "krex: unknown subcommand 'statsu'; did you mean 'status'?\n",
    )


# recover


def test_recovering_nothing_says_so() -> None:
    done = krex("recover")
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing to recover\n", "")


def test_purging_leaves_no_segment(runtime_dir: Path) -> None:
    krex("run", "--", "true")
    assert (runtime_dir / "segment").exists()
    done = krex("recover", "--purge")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout != "nothing to recover\n"
    assert not (runtime_dir / "segment").exists()


# status


EMPTY = {
    "runtime_dir": "/dev/shm/krex-0",
    "layout": None,
    "version": None,
    "devices": [],
    "tenants": [],
    "supervisors": [],
}
BUSY = {
    "runtime_dir": "/dev/shm/krex-0",
    "layout": 1,
    "version": "0.1.0",
    "devices": [
        {
            "name": "cpu",
            "phase": "held",
            "epoch": 12,
            "holder": "a b (c)",
            "label": "tim\x1b[31mings",
            "held_s": 0.0125,
            "cpus": "2-3",
            "queue": ["eval-2", "eval\n3"],
        },
        {
            "name": "cpu:numa1",
            "phase": "open",
            "epoch": 0,
            "holder": None,
            "label": "",
            "held_s": None,
            "cpus": None,
            "queue": [],
        },
    ],
    "tenants": [
        {
            "name": "評価",
            "pid": 4321,
            "state": "frozen",
            "phase": "compiling",
            "devices": ["cpu", "cpu:numa1"],
            "frozen": True,
            "freezer": "cgroup2",
        },
    ],
    "supervisors": [{"pid": 10, "worker_pid": 11, "alive": True}],
}


def test_an_empty_snapshot_says_that_nothing_is_running() -> None:
    assert status.as_text(EMPTY) == "runtime directory /dev/shm/krex-0\n\nnothing is running"


def test_a_snapshot_as_tables() -> None:
    assert status.as_text(BUSY).splitlines() == [
        "runtime directory /dev/shm/krex-0 (layout 1, krex 0.1.0)",
        "",
        "DEVICE     GATE  EPOCH  HOLDER   LABEL            HELD     CPUS  QUEUE",
        "cpu        held  12     a b (c)  tim\\x1b[31mings  12.5 ms  2-3   eval-2, eval\\n3",
        "cpu:numa1  open  0      -        -                -        -     -",
        "",
        "TENANT  PID   STATE   PHASE      DEVICES         FROZEN  FREEZER",
        "評価    4321  frozen  compiling  cpu, cpu:numa1  yes     cgroup2",
        "",
        "SUPERVISOR  WORKER  ALIVE",
        "10          11      yes",
    ]


def test_tables_fit_the_terminal() -> None:
    lines = table(["NAME", "N"], [["x" * 200, "1"], ["短" * 50, "2"]], width=40)
    assert lines[1] == "x" * 36 + "…  1"
    assert lines[2] == "短" * 18 + "…  2"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain name (1)", "plain name (1)"),
        ("a\x1b]0;b\x07", "a\\x1b]0;b\\x07"),
        ("a\nb\tc\\n", "a\\nb\\tc\\\\n"),
        ("\u202eevil", "\\u202eevil"),
        ("bad\udcff", "bad\\udcff"),
        ("é評", "é評"),
    ],
)
def test_names_are_printed_safely(name: str, shown: str) -> None:
    assert printable(name) == shown


def test_status_where_nothing_runs(runtime_dir: Path) -> None:
    done = krex("status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "nothing is running"
    shown = json.loads(krex("status", "--json").stdout)
    assert shown == status.take(str(runtime_dir))
    assert shown["runtime_dir"] == str(runtime_dir)


def test_status_of_a_running_command(runtime_dir: Path) -> None:
    name = "odd \x1b[31m (name)"
    command = [_native.native_program(), "run", "--name", name, "--", "sh", "-c"]
    with subprocess.Popen(
        [*command, "echo started; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        snapshot = json.loads(krex("status", "--json").stdout)
        text = krex("status", env={**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}).stdout
        process.communicate(b"\n")
    (tenant,) = snapshot["tenants"]
    assert (tenant["name"], tenant["pid"]) == (name, process.pid)
    assert tenant["devices"] == ["cpu"]
    assert "odd \\x1b[31m (name)" in text
    assert "\x1b" not in text
