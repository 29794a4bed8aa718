"""`krex bench`: what it says about commands, which are real processes, and never how fast."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import pty
import random
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from evaluator import read
from harness import is_running, wait_until
from krex import doctor
from krex._findings import Machine
from krex.bench import gate_stage, launch, machine, results, statistics, summary
from krex.bench.commands import Command
from krex.bench.directories import abandoned
from krex.bench.errors import BenchError, BenchUsageError
from krex.bench.interruption import Interruption
from krex.bench.measurement import Measurement, read_output
from krex.bench.policies import POLICIES, parse_policies
from krex.bench.progress import Progress
from krex.bench.results import TurnResult
from krex.bench.run import Run
from krex.bench.settings import RESERVED_VARIABLE, Settings, Turn
from krex.cli import main

KREX = [sys.executable, "-m", "krex"]
EVALUATOR = str(Path(__file__).with_name("evaluator.py"))
INCONCLUSIVE = 3


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No runtime directory and no process of a bench may be left."""
    before = directories()
    yield
    left = directories() - before
    # Somebody else's bench may run at the same time.
    assert not [it for it in left if int(it.split("-")[2]) == os.getpid() or not runs(it)]


def directories() -> set[str]:
    return {it.name for it in Path("/dev/shm").glob("krex-bench-*-*")}


def runs(directory: str) -> bool:
    """Whether the bench that made a directory still runs."""
    return is_running(int(directory.split("-")[2]))


class Bench:
    """A run of `krex bench` with commands of a test's own."""

    def __init__(self, directory: Path) -> None:
        self.commands = directory / "commands.jsonl"
        self.file = directory / "results.json"

    def argv(self, commands: Sequence[dict[str, Any]], *options: str) -> list[str]:
        self.commands.write_text("".join(json.dumps(it) + "\n" for it in commands))
        files = ["--commands", str(self.commands), "--export-json", str(self.file)]
        return [*KREX, "bench", *files, *options]

    def run(
        self, commands: Sequence[dict[str, Any]], *options: str, status: int = 0
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.argv(commands, *options), capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert "nan%" not in done.stdout
        assert "nanx" not in done.stdout
        return done

    def results(self) -> dict[str, Any]:
        def refuse(word: str) -> None:
            raise AssertionError(f"{word} in JSON")

        found: dict[str, Any] = json.loads(self.file.read_text(), parse_constant=refuse)
        return found

    def policy(self, name: str) -> dict[str, Any]:
        (found,) = (it for it in self.results()["policies"] if it["policy"] == name)
        entry: dict[str, Any] = found
        return entry


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def shell(script: str, kind: str | None = None) -> dict[str, Any]:
    command: dict[str, Any] = {"argv": ["sh", "-c", script]}
    return command if kind is None else command | {"kind": kind}


def prints(kind: str, ms: object) -> str:
    return f"echo '{json.dumps({'kind': kind, 'ms': ms})}'"


# Statistics, against known samples


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.5, 3.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.5),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.95, 4.8),
        ([5.0, 1.0], 1.0, 5.0),
        ([5.0, 1.0], 0.0, 1.0),
        ([], 0.5, None),
    ],
)
def test_percentiles_of_known_samples(
    values: list[float], share: float, expected: float | None
) -> None:
    assert statistics.percentile(values, share) == pytest.approx(expected)


def test_percentiles_are_those_of_numpy() -> None:
    import numpy as np

    generator = random.Random(3)
    for size in (1, 2, 7, 60):
        values = [generator.expovariate(1) for _ in range(size)]
        for share in (0.0, 0.05, 0.5, 0.95, 1.0):
            expected = float(np.percentile(values, 100 * share))
            assert statistics.percentile(values, share) == pytest.approx(expected)


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_share_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        statistics.percentile([1.0], share)


@pytest.mark.parametrize(
    ("ratios", "tolerance", "expected"),
    [
        ([1.0, 1.05, 0.95, 1.0501, 0.9499], 0.05, 0.6),
        ([2.0, 0.5], 0.10, 0.0),
        ([1.02], 0.02, 1.0),
        ([], 0.05, None),
    ],
)
def test_shares_of_known_samples(
    ratios: list[float], tolerance: float, expected: float | None
) -> None:
    assert statistics.share_within(ratios, tolerance) == expected


def test_a_difference_is_the_same_both_ways() -> None:
    assert statistics.relative_difference(2.0, 3.0) == pytest.approx(0.5)
    assert statistics.relative_difference(3.0, 2.0) == pytest.approx(0.5)


# What a run's measurements say


def measured(policy: str, turn: int, *times: float | None, kind: str = "k") -> list[Measurement]:
    return [
        Measurement(
            policy=policy,
            round=turn,
            position=position,
            command=0,
            kind=kind,
            outcome="crashed" if ms is None else "ok",
            detail="",
            ms=ms,
            verdict=None,
            reasons=(),
            started_at=0.0,
            ended_at=1.0,
            exit_status=0,
            signal=None,
        )
        for position, ms in enumerate(times)
    ]


def said(*measurements: list[Measurement], rounds: int = 2) -> summary.Summary:
    flat = [it for some in measurements for it in some]
    names = ",".join({it.policy: None for it in flat})
    settings = Settings((Command(("x",)),), parse_policies(names), rounds=rounds)
    turns = {it.name: TurnResult(seconds=30.0) for it in settings.policies}
    return summary.summarise(flat, settings, turns)


STEADY = [measured("solo", turn, 1.0, 1.01, 0.99) for turn in (1, 2, 3)]


def test_inflation_is_against_the_median_of_solo() -> None:
    found = said(*STEADY, measured("ungated", 1, 1.0, 1.04, 2.0, 4.0, None))
    solo, ungated = found.policies
    assert found.references["k"]["median_ms"] == 1.0
    assert (solo["within_2pct"], solo["commands_per_minute"]) == (1.0, 18.0)
    assert (ungated["commands"], ungated["usable"], ungated["broken"]) == (5, 4, {"crashed": 1})
    assert ungated["commands_per_minute"] == 8.0
    shares = [ungated[f"within_{tolerance}pct"] for tolerance in (2, 5, 10)]
    assert shares == [0.25, 0.5, 0.5]
    assert ungated["inflation_p50"] == pytest.approx(1.52)
    assert ungated["inflation_max"] == 4.0


@pytest.mark.parametrize(
    ("measurements", "doubt"),
    [
        (
            [measured("solo", 1, 1.0, 1.0), measured("solo", 3, 1.04, 1.04)],
            "k: solo's median moved by 4.0% during the run, from 1 to 1.04 ms (more than 3%)",
        ),
        (
            [measured("solo", turn, 1.0, 1.0, 1.0, 1.2, 0.8) for turn in (1, 3)],
            "k: solo itself came within 5% of its median in 60% only (less than 80%)",
        ),
        (
            [measured("solo", 1, 1.0, 1.0, 1.0)],
            "k: solo was not measured both at the beginning and at the end",
        ),
        (
            [measured("solo", 1, 1.0), measured("solo", 3, 1.0)],
            "k: 2 usable solo measurements, at least 3 are needed",
        ),
        (
            [*STEADY, measured("krex", 1, 1.0, kind="other")],
            "other: 0 usable solo measurements, at least 3 are needed",
        ),
        ([*STEADY, measured("krex", 1, None, None)], "krex: no usable measurements"),
        (
            [*STEADY, measured("krex", 1, *[1.0] * 18, None)],
            "krex: 1 of 19 commands broke (more than 5%), and are in none of its timings",
        ),
    ],
)
def test_doubtful_references_are_named(measurements: list[list[Measurement]], doubt: str) -> None:
    assert said(*measurements).doubts == [doubt]


def test_a_few_broken_commands_are_no_doubt() -> None:
    found = said(*STEADY, measured("krex", 1, *[1.0] * 19, None))
    assert (found.doubts, found.policies[1]["broken"]) == ([], {"crashed": 1})


def test_what_cannot_be_compared_is_not_counted() -> None:
    found = said(*STEADY, measured("krex", 1, 1.0, kind="other"), measured("krex", 1, 1.0))
    assert (found.policies[1]["usable"], found.policies[1]["compared"]) == (2, 1)


def test_all_ratios_of_what_is_believed_are_finite() -> None:
    extremes = [1e-9, 1e12, 1e-9, 1e12]
    found = said(*[measured("solo", turn, *extremes) for turn in (1, 3)], STEADY[0])
    json.dumps([found.references, found.policies], allow_nan=False)
    assert found.policies[0]["inflation_max"] > 1


# Turns


def test_policies_take_turns_between_references() -> None:
    settings = Settings((), parse_policies("krex,ungated"), rounds=2)
    turns = [(it.policy.name, it.round) for it in settings.turns()]
    assert turns == [
        ("solo", 1),
        ("krex", 1),
        ("ungated", 1),
        ("solo", 2),
        ("ungated", 2),
        ("krex", 2),
        ("solo", 3),
    ]


# What a command prints


@pytest.mark.parametrize(
    ("output", "outcome"),
    [
        ('{"kind": "k", "ms": 1}', "ok"),
        ('noise\n{"kind": "k", "ms": 1.5, "verdict": "clean"}\nmore {noise}\n', "ok"),
        ('{"kind": "k", "ms": 1}\n{"step": 2}\n', "ok"),
        ('{"kind": "k", "ms": 1, "verdict": "a\u2028b"}\r\n', "ok"),
        ('\ufffd\x00\n{"kind": "k", "ms": 1}', "ok"),
        ("", "no result"),
        ("1.5 ms", "no result"),
        ("[" * 100_000, "no result"),
        ("{" + '"a":{' * 100_000, "no result"),
        ('{"kind": "k"}', "no result"),
        ('{"ms": 1}', "bad result"),
        ('{"kind": "other", "ms": 1}', "bad result"),
        ('{"kind": "k", "ms": NaN}', "bad result"),
        ('{"kind": "k", "ms": Infinity}', "bad result"),
        ('{"kind": "k", "ms": -1}', "bad result"),
        ('{"kind": "k", "ms": 0}', "bad result"),
        ('{"kind": "k", "ms": 1e-9}', "ok"),
        ('{"kind": "k", "ms": 1e-10}', "bad result"),
        ('{"kind": "k", "ms": 1e12}', "ok"),
        ('{"kind": "k", "ms": 1.1e12}', "bad result"),
        ('{"kind": "k", "ms": 1e308}', "bad result"),
        ('{"kind": "k", "ms": "1"}', "bad result"),
        ('{"kind": "k", "ms": true}', "bad result"),
        ('{"kind": "k", "ms": null}', "bad result"),
        ('{"kind": "k", "ms": 1' + "0" * 400 + "}", "bad result"),
    ],
)
def test_what_is_taken_as_a_result(output: str, outcome: str) -> None:
    assert read_output(output, "k").outcome == outcome


# Usage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policies", "sol"], "unknown policy 'sol'; did you mean 'solo'?"),
        (["--policies", "x"], "unknown policy 'x'; there are solo, ungated, exclusive"),
        (["--device", "gpu"], 'unknown device "gpu"'),
        (["--width", "0"], "--width is a number from 1 to 1000"),
        (["--count", "0"], "--count is a number from 1 to 1000000"),
        (["--count", "9" * 12], "--count is a number from 1 to 1000000"),
        (["--rounds", "-1"], "--rounds is a number from 1 to 1000"),
        (["--policies", ","], "no policy is named; there are solo, ungated"),
        (["--timeout", "1e300"], "--timeout is a number of seconds above 0"),
        (["--timeout", "nan"], "--timeout is a number of seconds above 0"),
        (["--export-json", ""], "--export-json needs the name of a file"),
        (["gate", "--export-json", ""], "--export-json needs the name of a file"),
        (["--resume"], "--resume needs --export-json FILE"),
        (["--commands", "/dev/null"], "/dev/null: no commands in it"),
        (["--frob"], "unrecognized arguments: --frob"),
        (["gate", "--repeats", "0"], "--repeats is a number from 1 to 1000000"),
        (["gate", "--siblings", "-1"], "--siblings is a number from 0 to 1000"),
        (["--width=9", "gate"], "--width before `gate` is an option of `krex bench`; those of"),
        (["--export-json=f", "gate"], "--export-json before `gate` is an option of `krex bench`"),
        (["--resume", "gate", "--export-json=f"], "--resume before `gate` is an option of"),
    ],
)
def test_usage_errors(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"krex: {message}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("x", "not JSON"),
        ("[]", "not an object like"),
        ("{}", "argv is a list of words"),
        ('{"argv": []}', "argv is a list of words"),
        ('{"argv": "true"}', "argv is a list of words"),
        ('{"argv": ["a\\u0000"]}', "argv is a list of words"),
        ('{"argv": ["\\ud800"]}', "'\\ud800' cannot be handed to a command"),
        ('{"argv": ["true"], "env": {"A": "\\ud800"}}', "'\\ud800' cannot be handed to"),
        ('{"argv": ["true"], "env": {"\\ud800": ""}}', "'\\ud800' cannot be handed to"),
        ('{"argv": ["true"], "env": {"A": "\\u0000"}}', "env is an object whose values are words"),
        ('{"argv": ["true"], "env": {"\\u0000": ""}}', "'\\x00' is no name of an environment"),
        (
            '{"argv": ["true"], "kind": "\\ud800"}',
            "the kind '\\ud800' cannot be written in UTF-8",
        ),
        (
            '{"argv": ["true"], "kind": "\\udcff"}',
            "the kind '\\udcff' cannot be written in UTF-8",
        ),
        ('{"argv": ["true"], "kind": "\\u0000"}', "kind is a word"),
        ("[" * 100_000, "not JSON that can be read: too deep"),
        ('{"argv": ["true"], "kind": 1}', "kind is a word"),
        ('{"argv": ["true"], "env": {"A": 1}}', "env is an object whose values are words"),
        ('{"argv": ["true"], "env": {"A=": "1"}}', "'A=' is no name of an environment variable"),
        ('{"argv": ["true"], "args": []}', "unknown key 'args'; there are argv, kind, env"),
    ],
)
def test_bad_commands_are_named_by_line(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "commands"
    path.write_text(f'{{"argv": ["true"]}}\n\n{line}\n')
    assert main(["bench", "--commands", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"krex: {path}:3: {message}")


@pytest.mark.parametrize(
    "text", ["", "a", "1-", "-1", "3-1", "0,,1", "0-99999999999999", "+1", "0-8:0", "1:2", "0-8:"]
)
def test_lists_of_cpus_that_are_none(text: str) -> None:
    with pytest.raises(BenchUsageError, match="is no list of CPUs"):
        machine.parse_cpus(text, range(9))


def test_lists_of_cpus() -> None:
    assert machine.parse_cpus("0-2,5", range(9)) == {0, 1, 2, 5}
    assert machine.parse_cpus("1, 2-8:3", range(9)) == {1, 2, 5, 8}
    with pytest.raises(BenchUsageError, match="CPU 9 may not be used here"):
        machine.parse_cpus("9", range(9))


@pytest.mark.parametrize("where", ["environment", "command"])
def test_reserved_cpus_are_those_of_all_commands(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, last = sorted(os.sched_getaffinity(0))
    there = ",".join(str(it) for it in sorted(os.sched_getaffinity(0)))
    command = shell("true")
    if where == "environment":
        monkeypatch.setenv(RESERVED_VARIABLE, f"{last},{last + 1}")
    else:
        command["env"] = {RESERVED_VARIABLE: f"{last},{last + 1}"}
    path = tmp_path / "commands"
    path.write_text(json.dumps(command))
    assert main(["bench", f"--commands={path}", f"--cpus={there}"]) == 2
    assert capsys.readouterr().err == (
        f"krex: {RESERVED_VARIABLE} has to be some of the CPUs that all commands share (--cpus): "
        f"CPU {last + 1} may not be used here; there are {there}\n"
    )


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("KREX_MAX_CLOSED", "abc", 'KREX_MAX_CLOSED is "abc"'),
        ("KREX_FREEZER", "bogus", 'KREX_FREEZER is "bogus"'),
    ],
)
@pytest.mark.parametrize("where", ["environment", "command"])
def test_settings_that_krex_refuses_are_found_out_first(
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    variable: str,
    value: str,
    message: str,
) -> None:
    command = shell("exit 1")
    if where == "environment":
        monkeypatch.setenv(variable, value)
    else:
        command["env"] = {variable: value}
    done = bench.run([shell("exit 1"), command], status=2)
    assert done.stdout == ""
    assert done.stderr.startswith(f"krex: `krex run` refuses to run: {message}")
    assert not bench.file.exists()
    # Nobody else needs to know.
    few = ["--policies=ungated", "--rounds=1", "--count=2"]
    bench.run([command], *few, status=INCONCLUSIVE)


def test_without_numpy_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert main(["bench"]) == 125
    assert "numpy, which comes with krex's extra `bench`" in capsys.readouterr().err


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("missing/results.json", 125, "No such file or directory"),
        ("", 2, "is not a file, so it cannot be replaced by one"),
        ("pipe", 2, "is not a file, so it cannot be replaced by one"),
    ],
)
def test_a_file_that_cannot_be_written_is_found_out_first(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    status: int,
    message: str,
    gate: bool,
) -> None:
    ran = tmp_path / "ran"
    os.mkfifo(tmp_path / "pipe")
    commands = tmp_path / "commands"
    commands.write_text(json.dumps(shell(f"touch {shlex.quote(str(ran))}")))
    what = ["gate"] if gate else ["--commands", str(commands)]
    assert main(["bench", *what, "--export-json", str(tmp_path / name)]) == status
    shown = capsys.readouterr()
    assert (shown.out, message in shown.err) == ("", True)
    assert str(tmp_path / name) in shown.err
    assert ".lock" not in shown.err
    assert not ran.exists()
    assert {it.name for it in tmp_path.iterdir()} == {"pipe", "commands"}


def test_a_file_behind_a_link_is_replaced_there(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to("elsewhere/file")
    with results.reserved(str(link)):
        results.save(str(link), {"a": 1})
    assert [it.name for it in (tmp_path / "elsewhere").iterdir()] == ["file"]
    assert link.is_symlink()
    assert json.loads((tmp_path / "elsewhere" / "file").read_text()) == {"a": 1}


def test_two_benches_do_not_write_to_one_file(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = bench.argv([shell("true")], "--policies=solo", "--count=1", "--rounds=1")[3:]
    with results.reserved(str(bench.file)):
        for words in (argv, ["bench", "gate", f"--export-json={bench.file}"]):
            assert main(words) == 2
            assert capsys.readouterr().err == f"krex: another krex bench writes to {bench.file}\n"
    assert main(argv) == INCONCLUSIVE
    assert {it.name for it in bench.file.parent.iterdir()} == {bench.commands.name, bench.file.name}


def test_a_result_that_nobody_would_see_is_not_measured(bench: Bench, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    argv = bench.argv([shell(f"touch {shlex.quote(str(ran))}")], "--count=1", "--rounds=1")
    without = [it for it in argv if it not in ("--export-json", str(bench.file))]
    for words, status in ((without, 1), (argv, INCONCLUSIVE)):
        done = subprocess.run(
            ["sh", "-c", f"exec {shlex.join(words)} >&-"],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stderr
        assert ("standard output is closed" in done.stderr) == (status == 1)
        assert ran.exists() == (status != 1)


def test_what_cannot_be_saved_any_more_is_saved_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = results.save_or_rescue(str(tmp_path / "gone" / "file"), {"a": 1})
    (kept,) = tmp_path.iterdir()
    assert told == (
        f"cannot write {tmp_path}/gone/file: No such file or directory; "
        f"what was measured is in {kept}"
    )
    assert json.loads(kept.read_text()) == {"a": 1}


def test_a_full_disk_keeps_no_part_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_a_part(_: object, file: IO[str]) -> None:
        written.append(file.name)
        file.write("{")
        file.flush()
        raise OSError(errno.ENOSPC, "No space left on device")

    written: list[Any] = []
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(results, "_write", write_a_part)
    rescued = set(Path("/dev/shm").glob("krex-results-*"))
    told = results.save_or_rescue(str(tmp_path / "file"), {"a": 1})
    assert told is not None
    assert "No space left on device; nor anything elsewhere" in told
    assert len(written) == 4
    assert list(tmp_path.iterdir()) == []
    assert set(Path("/dev/shm").glob("krex-results-*")) <= rescued


def test_a_number_that_json_has_not_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told = results.save_or_rescue(str(tmp_path / "file"), {"a": math.inf})
    assert told is not None
    assert told.startswith(f"cannot write {tmp_path}/file: Out of range float values")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ms", [math.nan, math.inf, 1e308, -1.0, 0.0, None, "1", True])
def test_measurements_that_are_none_are_not_resumed(ms: Any) -> None:
    (fine,) = measured("solo", 1, 1.0)
    assert Measurement.from_dict(fine.to_dict()) == fine
    with pytest.raises(ValueError, match="not a measurement"):
        Measurement.from_dict(fine.to_dict() | {"ms": ms})


# Real runs


def test_all_policies_and_every_measurement_are_in_the_file(bench: Bench) -> None:
    # Sharing the machine makes this command slower by half, whatever the machine does.
    script = (
        f"if [ $KREX_BENCH_POLICY = ungated ]; then {prints('b', 3)}; else {prints('b', 2)}; fi"
    )
    commands = [shell(prints("a", 5), "a"), shell(script)]
    done = bench.run(commands, "--width=2", "--count=4", "--rounds=1")
    found = bench.results()
    assert found["is_finished"]
    assert found["is_conclusive"]
    assert found["krex_version"]
    assert {"cpu", "cores", "kernel"} <= set(found["machine"])
    assert [it["policy"] for it in found["policies"]] == list(POLICIES)
    for entry in found["policies"]:
        runs = 8 if entry["policy"] == "solo" else 4
        assert entry["usable"] == len(entry["measurements"]) == runs
        assert entry["commands_per_minute"] > 0
        assert entry["inflation_p50"] == (1.25 if entry["policy"] == "ungated" else 1.0)
        assert entry["within_5pct"] == (0.5 if entry["policy"] == "ungated" else 1.0)
        assert entry["policy"] in done.stdout
        # All commands alike.
        assert Counter(it["command"] for it in entry["measurements"]) == {0: runs / 2, 1: runs / 2}
        for it in entry["measurements"]:
            assert (it["outcome"], it["exit_status"]) == ("ok", 0)
            assert it["inflation"] == (
                1.5 if (entry["policy"], it["kind"]) == ("ungated", "b") else 1.0
            )
            assert found["started_at"] < it["started_at"] < it["ended_at"] < time.time()
    assert "region-lock: only 0 regions in 4 usable commands" in done.stdout
    assert (
        "krex: 4 of 4 usable commands told no verdict (regions of all 4 commands: 0)" in done.stdout
    )
    assert "4 told none" in done.stdout


@pytest.mark.parametrize("direct", [False, True])
def test_policies_do_what_they_say(bench: Bench, tmp_path: Path, direct: bool) -> None:
    log = tmp_path / "log"
    argv = [sys.executable, EVALUATOR, str(log), "--meet=2", *(["--direct"] if direct else [])]
    # A command that enters a region by itself cannot take part in region-lock.
    names = [name for name in POLICIES if not (direct and name == "region-lock")]
    options = ["--width=2", "--count=2", "--rounds=1", f"--policies={','.join(names)}"]
    done = bench.run([{"argv": argv}], *options)
    notes = read(log)
    for name in names:
        commands = overlaps(notes, name, "begin", "end")
        regions = overlaps(notes, name, "enter", "leave")
        # Where they overlap they have waited for each other: it was not by chance.
        assert commands == (0 if name in ("solo", "exclusive") else 1), name
        assert regions == (1 if name == "ungated" else 0), name
        entry = bench.policy(name)
        are_told = "not told" not in entry["verdicts"]
        assert are_told == (name == "krex" or direct), done.stdout
        assert entry["regions"] == (2 if name in ("region-lock", "krex") else None)
    assert "unprotected" not in done.stdout


def overlaps(notes: list[dict[str, Any]], policy: str, first: str, last: str) -> int:
    """How many pairs of processes were between two words at once."""
    spans: dict[int, dict[str, int]] = {}
    for it in notes:
        if it["policy"] == policy:
            spans.setdefault(it["pid"], {})[it["word"]] = it["at"]
    every = sorted((it[first], it[last]) for it in spans.values())
    return sum(
        later[0] < earlier[1] for place, earlier in enumerate(every) for later in every[place + 1 :]
    )


def test_the_commands_of_exclusive_wait_beside_each_other(bench: Bench, tmp_path: Path) -> None:
    go, log = tmp_path / "go", tmp_path / "log"
    script = (
        f"if [ $KREX_BENCH_POLICY = exclusive ]; then echo $$ >> {shlex.quote(str(log))}; "
        f"while ! [ -e {shlex.quote(str(go))} ]; do sleep 0.02; done; fi; {prints('k', 1)}"
    )
    options = ["--width=3", "--count=4", "--rounds=1", "--policies=exclusive"]
    with subprocess.Popen(bench.argv([shell(script)], *options), stdout=subprocess.PIPE) as process:
        try:
            wait_until(lambda: log.exists() and len(children(process.pid)) == 3, "three wait")
            assert len(log.read_text().split()) == 1
        finally:
            go.touch()
            assert process.wait(60) == 0
    assert bench.policy("exclusive")["usable"] == 4


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.parametrize("policy", ["exclusive", "krex"])
def test_the_time_limit_does_not_count_what_the_policy_keeps_waiting(
    bench: Bench, policy: str
) -> None:
    script = (
        "import json, os, time\n"
        "from krex.bench import region\n"
        "with region():\n"
        f"    busy = 1.6 if os.environ['KREX_BENCH_POLICY'] == {policy!r} else 0\n"
        "    end = time.monotonic() + busy\n"
        "    while time.monotonic() < end: pass\n"
        "print(json.dumps({'kind': 'k', 'ms': 1}))\n"
    )
    options = ["--width=3", "--count=3", "--rounds=1", "--timeout=3", f"--policies={policy}"]
    bench.run([{"argv": [sys.executable, "-c", script]}], *options)
    assert bench.policy(policy)["seconds"] > 4.8


def test_the_time_limit_is_the_same_for_who_handles_sigterm(bench: Bench) -> None:
    command = shell(f"trap 'exit 0' TERM; {prints('k', 1)}; sleep 1000 & wait")
    options = ["--width=2", "--count=2", "--rounds=1", "--timeout=0.5"]
    bench.run([command], *options, status=INCONCLUSIVE)
    for entry in bench.results()["policies"]:
        assert entry["broken"] == {"timed out": len(entry["measurements"])}, entry["policy"]
    # Who waits for the lock is not ended with the one that has it.
    assert bench.policy("exclusive")["seconds"] >= 1.0


@pytest.mark.parametrize("word", ["a\0b", "\ud800"])
def test_what_cannot_be_handed_over_is_not_started(word: str) -> None:
    command = Command(("true", word), "k")
    settings = Settings((command,), parse_policies("ungated"), width=1)
    with launch.Launcher(settings) as launcher:
        assert launcher.try_start(launch.Job(Turn(POLICIES["ungated"], 1), 0, 0, command))
        (found,) = launcher.wait(0)
    assert found.outcome == "not started"
    assert found.detail.endswith(": true")


def test_status_2_of_krex_run_is_not_the_command_s(bench: Bench) -> None:
    script = "echo 'krex: no' >&2; exit 2"  # as krex run ends where a setting makes no sense
    options = ["--rounds=1", "--count=1", "--policies=krex"]
    bench.run([shell(script)], *options, status=INCONCLUSIVE)
    assert bench.policy("solo")["broken"] == {"crashed": 2}
    assert bench.policy("krex")["broken"] == {"not started": 1}


def test_names_of_programs_need_not_be_text(bench: Bench, tmp_path: Path) -> None:
    program = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    program.write_text(f"#!/bin/sh\n{prints('k', 1)}\n")
    program.chmod(0o700)
    options = ["--rounds=1", "--count=3", "--policies=krex"]
    bench.commands.write_bytes(b'{"argv": ["%s"]}\n' % os.fsencode(program))
    argv = [*KREX, "bench", "--commands", str(bench.commands), *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("policy", POLICIES)
def test_a_killed_bench_leaves_no_commands_and_what_it_leaves_is_swept(
    bench: Bench, tmp_path: Path, policy: str
) -> None:
    pids = tmp_path / "pids"
    script = (
        f"if [ $KREX_BENCH_POLICY = {policy} ]; then echo $$ >> {shlex.quote(str(pids))}; "
        f"exec sleep 1000; fi; {prints('k', 1)}"
    )
    options = ["--width=2", "--count=2", "--rounds=1", f"--policies={policy}"]
    at_once = 1 if POLICIES[policy].is_serial or policy == "exclusive" else 2
    with subprocess.Popen(bench.argv([shell(script)], *options)) as process:
        try:
            wait_until(
                lambda: pids.exists() and len(pids.read_text().split()) == at_once, "they run"
            )
            # The directory of the bench itself, not of its trial.
            (name,) = own_directories(process.pid)
            assert Path("/dev/shm", name) not in abandoned()
        finally:
            process.kill()
    wait_until(
        lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()), "they are gone"
    )
    assert Path("/dev/shm", name) in abandoned()
    (finding,) = doctor.check_bench_directories(Machine({}))
    assert finding.level == "warning"
    assert name in str(finding.remedy)
    assert main(["bench", "gate", "--siblings=0"]) == 0
    assert not Path("/dev/shm", name).exists()


def own_directories(pid: int) -> set[str]:
    return {it for it in directories() if it.startswith(f"krex-bench-{pid}-")}


def test_what_sigkill_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    command = Command((sys.executable, "-c", "import time; time.sleep(1000)"), "k")
    settings = Settings((command,), parse_policies("ungated"), width=1, timeout=0.2)
    turn = Turn(POLICIES["ungated"], 1)
    with launch.Launcher(settings) as launcher, monkeypatch.context() as patch:
        # As if it hung in the kernel.
        patch.setattr(launch._Running, "kill", lambda _: None)
        patch.setattr(launch, "_KILL_LIMIT_S", 0.2)
        assert launcher.try_start(launch.Job(turn, 0, 0, command))
        (running,) = launcher._running
        assert running.process is not None
        try:
            found = wait_until(lambda: launcher.wait(0.1), "it is given up", 10)
            assert [it.outcome for it in found] == ["timed out"]
            assert found[0].detail == (
                f"not done after 0.2 s; process {running.process.pid} cannot be killed and was "
                "left behind"
            )
            assert launcher.running == 0
            # And another one runs in its place.
            assert launcher.try_start(launch.Job(turn, 1, 0, command))
        finally:
            running.process.kill()
            running.process.wait()


def test_region_lock_says_who_does_not_take_part(bench: Bench, tmp_path: Path) -> None:
    argv = [sys.executable, EVALUATOR, str(tmp_path / "log"), "--direct"]
    options = ["--width=2", "--count=2", "--rounds=1", "--policies=region-lock"]
    done = bench.run([{"argv": argv}], *options)
    assert bench.policy("region-lock")["regions"] == 0
    assert "region-lock: only 0 regions in 2 usable commands" in done.stdout


def test_regions_of_broken_commands_hide_nobody_without_one(bench: Bench) -> None:
    marked = "from krex.bench import region\nwith region(): pass\nexit(1)"
    commands = [
        {"argv": [sys.executable, "-c", marked], "kind": "broken"},
        shell(prints("k" * 50, 1)),
    ]
    options = ["--count=2", "--rounds=1", "--policies=krex"]
    done = bench.run(commands, *options, status=INCONCLUSIVE)
    assert bench.policy("krex")["regions"] == 1
    said = "krex: 1 of 1 usable commands told no verdict (regions of all 2 commands: 1)"
    assert said in done.stdout
    assert "k" * 39 + "…" in done.stdout
    assert done.stdout.count("k" * 41) == 1  # among the reasons why it is inconclusive


def test_broken_commands_are_counted_and_shown(bench: Bench, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    remember = f"echo $$ >> {shlex.quote(str(pids))}"
    commands = [
        shell(prints("good", 1), "good"),
        shell(f"{prints('crash', 1)}; echo no luck >&2; exit 7", "crash"),
        shell("kill -SEGV $$", "signal"),
        # Partly in a session of its own, as harnesses start what they test: it is ended as well.
        shell(f"{remember}; setsid sh -c '{remember}; exec sleep 1000' & wait", "hang"),
        shell("echo fine", "silent"),
        shell('echo \'{"kind": "nan", "ms": NaN}\'', "nan"),
        shell(prints("negative", -1), "negative"),
        shell(prints("wrong", 1), "right"),
        {"argv": ["/no/such/program"], "kind": "missing"},
        # Its background process is ended with it, or it would disturb the others.
        shell(f"sleep 1000 & echo $! >> {shlex.quote(str(pids))}; {prints('left', 1)}", "left"),
    ]
    options = ["--width=5", "--rounds=1", f"--count={len(commands)}", "--timeout=3"]
    done = bench.run(commands, *options, "--policies=ungated,krex", status=INCONCLUSIVE)
    expected = {
        "good": "ok",
        "crash": "crashed",
        "signal": "crashed",
        "hang": "timed out",
        "silent": "no result",
        "nan": "bad result",
        "negative": "bad result",
        "right": "bad result",
        "missing": "not started",
        "left": "ok",
    }
    for entry in bench.results()["policies"]:
        assert {it["kind"]: it["outcome"] for it in entry["measurements"]} == expected
        times = 2 if entry["policy"] == "solo" else 1
        assert entry["broken"]["bad result"] == 3 * times
        assert entry["usable"] == 2 * times
        details = {it["kind"]: it["detail"] for it in entry["measurements"]}
        assert details["crash"] == "exit status 7: no luck"
        assert details["signal"].startswith("ended by SIGSEGV")
        assert details["hang"] == "not done after 3 s"
    assert "krex: 8 of 10 commands broke: 3 bad result, 2 crashed" in done.stdout
    wait_until(
        lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()),
        "what commands left behind is gone",
    )


def test_a_command_that_prints_without_end_is_ended(bench: Bench) -> None:
    options = ["--rounds=1", "--count=1", "--policies=krex"]
    bench.run([shell("exec yes '{'", "endless")], *options, status=INCONCLUSIVE)
    for entry in bench.results()["policies"]:
        for it in entry["measurements"]:
            assert (it["outcome"], it["detail"]) == ("bad result", "printed more than 64 MiB")


def test_a_command_that_prints_too_much_and_ends_is_broken(bench: Bench) -> None:
    script = f"head -c 70000000 /dev/zero; echo; {prints('k', 1)}"
    options = ["--rounds=1", "--count=1", "--policies=solo"]
    bench.run([shell(script)], *options, status=INCONCLUSIVE)
    assert bench.policy("solo")["broken"] == {"bad result": 2}


def test_without_usable_measurements_it_says_so(bench: Bench) -> None:
    options = ["--rounds=1", "--count=1", "--policies=krex"]
    done = bench.run([shell("exit 1")], *options, status=INCONCLUSIVE)
    assert done.stdout.count("no usable measurements") >= 2
    entry = bench.policy("krex")
    for name in ("commands_per_minute", "within_5pct", "inflation_p50", "inflation_max"):
        assert entry[name] is None


def test_a_drift_makes_it_inconclusive(bench: Bench, tmp_path: Path) -> None:
    count = shlex.quote(str(tmp_path / "count"))
    script = f'echo >> {count}; n=$(wc -l < {count}); echo \'{{"kind": "k", "ms": \'$n\'}}\''
    options = ["--rounds=1", "--count=3", "--policies=solo"]
    done = bench.run([shell(script)], *options, status=INCONCLUSIVE)
    assert not bench.results()["is_conclusive"]
    assert "inconclusive:" in done.stdout
    assert "solo's median moved by 150.0% during the run, from 2 to 5 ms" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_it_has_and_goes_on(
    bench: Bench, tmp_path: Path, number: int
) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    # The first few run through, the others wait to be let go.
    script = (
        f"echo $$ >> {shlex.quote(str(log))}; n=$(wc -l < {shlex.quote(str(log))}); "
        f"while [ $n -gt 5 ] && ! [ -e {shlex.quote(str(go))} ]; do sleep 0.05; done; "
        f"{prints('k', 1)}"
    )
    options = ["--width=2", "--count=3", "--rounds=1", "--policies=ungated,krex"]
    process = subprocess.Popen(
        bench.argv([shell(script)], *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(
            lambda: log.exists() and len(log.read_text().split()) > 5,
            "a command waits to be let go",
        )
    finally:
        process.send_signal(number)
        out, err = communicate(process)
    assert process.returncode == -number, out + err
    assert f"--resume --export-json {bench.file}" in err
    assert not any(is_running(int(pid)) for pid in log.read_text().split())
    kept = bench.results()
    assert not kept["is_finished"]
    before = {key(it) for entry in kept["policies"] for it in entry["measurements"]}
    assert len(before) in (4, 5)  # the fifth may not have ended when the sixth began
    assert f"interrupted after {len(before)} commands" in out

    go.touch()
    done = bench.run([shell(script)], *options, status=2)
    assert "holds an interrupted run: go on with --resume, or remove it" in done.stderr
    done = bench.run([shell(script)], *options, "--width=3", "--resume", status=2)
    assert "was measured under other conditions: width was 2 and is 3" in done.stderr
    bench.run([shell(script)], *options, "--resume")
    found = bench.results()
    assert found["is_finished"]
    assert found["started_at"] == kept["started_at"]
    after = Counter(key(it) for entry in found["policies"] for it in entry["measurements"])
    assert set(after.values()) == {1}
    assert len(after) == 3 * 4
    assert before <= set(after)


def test_regions_of_killed_commands_are_not_counted(bench: Bench, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    script = (
        "import os, sys, time\n"
        "from krex.bench import region\n"
        "if os.environ['KREX_BENCH_POLICY'] == 'region-lock':\n"
        "    with region():\n"
        "        open(sys.argv[1], 'x').close()\n"
        "        time.sleep(1000)\n"
    )
    argv = [sys.executable, "-c", script, str(inside)]
    options = ["--count=1", "--rounds=1", "--policies=region-lock"]
    process = subprocess.Popen(
        bench.argv([{"argv": argv}], *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(inside.exists, "a command is in its region")
    finally:
        process.send_signal(signal.SIGINT)
        communicate(process)
    entry = bench.policy("region-lock")
    assert (entry["commands"], entry["regions"]) == (0, 0)


def test_another_krex_does_not_go_on(bench: Bench) -> None:
    options = ["--rounds=1", "--count=1", "--policies=solo"]
    bench.run([shell("exit 1")], *options, status=INCONCLUSIVE)
    bench.run([shell("exit 1")], *options, "--resume", status=INCONCLUSIVE)
    found = bench.results()
    bench.file.write_text(json.dumps(found | {"krex_version": "0.0.0"}))
    done = bench.run([shell("exit 1")], *options, "--resume", status=2)
    assert f'krex_version was "0.0.0" and is "{found["krex_version"]}"' in done.stderr


def test_the_file_is_written_when_no_command_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    monkeypatch.setattr("krex.bench.run.save", lambda *_: saved.append(1))
    command = Command(("sleep", "1.2"), "k")
    cpus = tuple(os.sched_getaffinity(0))
    settings = Settings((command,), parse_policies("solo"), count=2, rounds=1, cpus=cpus)
    found = results.Results(settings, machine.describe(), "1")
    Run(found, "file", Interruption(), Progress(4)).run()
    assert len(saved) == len(settings.turns())


def test_a_bench_that_was_stopped_itself_ends_nobody_for_it(bench: Bench, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        f"if [ $KREX_BENCH_POLICY = ungated ]; then echo $$ >> {shlex.quote(str(log))}; sleep 1; "
        f"fi; {prints('k', 1)}"
    )
    options = ["--width=2", "--count=2", "--rounds=1", "--timeout=2", "--policies=ungated"]
    process = subprocess.Popen(bench.argv([shell(script)], *options), stdout=subprocess.PIPE)
    try:
        wait_until(lambda: log.exists() and len(log.read_text().split()) == 2, "both run")
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    entry = bench.policy("ungated")
    assert entry["broken"] == {}
    assert entry["stopped_s"] > 2
    # From the beginning of the turn to its end, and so with the pause.
    longest = max(it["ended_at"] - it["started_at"] for it in entry["measurements"])
    assert entry["seconds"] < longest - 1.5
    assert b"krex bench itself was stopped for " in out


def communicate(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Wait for the end of a bench; one that does not end is killed."""
    try:
        return process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise


def key(measurement: dict[str, Any]) -> tuple[str, int, int]:
    return measurement["policy"], measurement["round"], measurement["position"]


@pytest.mark.parametrize("text", ["", "x", "[]", "{}", '{"format": 1}', '{"format": 99}'])
def test_only_its_own_files_are_resumed(bench: Bench, text: str) -> None:
    bench.file.write_text(text)
    done = bench.run([shell("true")], "--resume", status=2)
    assert str(bench.file) in done.stderr
    assert bench.file.read_text() == text


def test_measurements_that_were_changed_are_not_resumed(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    commands, options = [shell(prints("k", 1))], ["--rounds=1", "--count=1", "--policies=krex"]
    bench.run(commands, *options, status=INCONCLUSIVE)
    fine = bench.file.read_text()

    def refused(text: str) -> None:
        bench.file.write_text(text)
        assert main([*bench.argv(commands, *options)[3:], "--resume"]) == 2, text
        shown = capsys.readouterr().err
        assert shown.startswith(f"krex: {bench.file} is not a file of `krex bench"), text
        assert shown.count("\n") == 1
        assert bench.file.read_text() == text

    measurement: dict[str, list[Any]] = {
        "policy": [5, "none", "ungated", None],
        "round": ["x", 0, 3, 1.0, True, None, [1]],
        "position": [-1, 1, "0", None],
        "command": [-1, 1, None],
        "kind": [5, "", None],
        "outcome": ["fine", None, ["ok"]],
        "detail": [1, None],
        "ms": [math.nan, math.inf, -1, 0, "1", None, True],
        "verdict": [["x"], 1],
        "reasons": [[["a"]], "abc", None, [1]],
        "started_at": [math.nan, -math.inf, "0", None, 10**400],
        "ended_at": [math.nan, "x", None, False],
        "exit_status": ["0", 0.5, 256, -1],
        "signal": ["9", True],
    }
    turn: dict[str, list[Any]] = {
        "policy": ["x", None, ["krex"]],
        "round": [7, "1", None],
        "regions": ["x", -1, 1.5, math.nan],
        "seconds": [math.nan, -5, math.inf, 5e-324, "1", None, 10**400],
        "others_s": [math.nan, -1, None],
        "stopped_s": [math.inf, -1, None],
    }
    run: dict[str, list[Any]] = {
        "busy_before": [math.inf, math.nan, -1, 2, "0", None],
        "started_at": [math.nan, "x", None],
        "turns": [[], 5, None, {}, [1]],
        "policies": [5, None, [1], {"a": 1}],
    }
    for place, wrong in ((find_measurement, measurement), (find_turn, turn), (dict, run)):
        for name, values in wrong.items():
            for value in values:
                data = json.loads(fine)
                entry = data if place is dict else place(data)
                assert name in entry
                entry[name] = value
                refused(json.dumps(data))
    data = json.loads(fine)
    data["policies"][1]["measurements"] *= 2
    refused(json.dumps(data))
    data = json.loads(fine)
    data["turns"] *= 2
    refused(json.dumps(data))
    refused("[" * 200_000)
    refused("9" * 5000)
    bench.file.write_text(fine)
    bench.run(commands, *options, "--resume", status=INCONCLUSIVE)


def find_measurement(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["policies"][1]["measurements"][0]
    return found


def find_turn(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["turns"][1]
    return found


def test_a_bar_is_shown_on_terminals_only(bench: Bench) -> None:
    argv = bench.argv([shell(prints("k", 1))], "--count=2", "--rounds=1", "--policies=solo")
    leader, follower = pty.openpty()
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=follower) as process:
        os.close(follower)
        shown = b""
        try:
            while chunk := os.read(leader, 4096):
                shown += chunk
        except OSError:  # the terminal's other end is closed
            pass
        os.close(leader)
        assert process.wait(60) == 0
    assert b"\r[####" in shown
    assert b"/4 solo, round 1 of 1" in shown

    assert "\r" not in bench.run([shell(prints("k", 1))], "--count=2", "--rounds=1").stderr


def test_the_built_in_commands(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    # A user's own files must not be taken for modules of Python.
    (tmp_path / "json.py").write_text("raise SystemExit('not this one')")
    options = ["--policies=krex", "--count=3", "--rounds=1", f"--export-json={path}"]
    done = subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "krex"), "bench", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    # How alike their timings are depends on the machine.
    assert done.returncode in (0, INCONCLUSIVE), done.stdout + done.stderr
    solo, krex = json.loads(path.read_text())["policies"]
    assert (solo["usable"], krex["usable"]) == (6, 3)
    assert set(krex["kinds"]) == {"memory", "compute", "launch"}
    assert "not told" not in krex["verdicts"]
    assert krex["regions"] == 3


def test_gate_measures_each_thing(tmp_path: Path) -> None:
    path = tmp_path / "gate.json"
    options = ["--siblings=2", "--repeats=2", f"--export-json={path}"]
    done = subprocess.run(
        [*KREX, "bench", "gate", *options], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())["rows"]
    whats = " ".join(row["what"] for row in rows)
    words = ["floor", "submission", "critical", "flock", "semaphore", "2 idle siblings"]
    for word in [*words, "handed over", "SIGKILL"]:
        assert word in whats
        assert word in done.stdout
    for row in rows:
        assert 0 < row["median"] <= row["p95"] <= row["p99"] <= row["max"]


@pytest.mark.parametrize("printed", ["", "part of a line"])
def test_gate_does_not_wait_for_ever(printed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interruption = Interruption()
    script = f"import time; print({printed!r}, end='', flush=True); time.sleep(1000)"
    monkeypatch.setattr(gate_stage, "own_program", lambda *_: (sys.executable, "-c", script))
    with gate_stage.Stage(interruption) as stage:
        monkeypatch.setattr(gate_stage, "_LIMIT_S", 0.5)
        with pytest.raises(BenchError, match=r"did not answer within 0\.5 s"):
            stage.start("timer", is_tenant=False)
        monkeypatch.setattr(gate_stage, "_LIMIT_S", 60)
        threading.Timer(0.3, lambda: setattr(interruption, "signal", signal.SIGINT)).start()
        with pytest.raises(gate_stage.Interrupted):
            stage.start("timer", is_tenant=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_gate_leaves_nothing_when_interrupted(number: int) -> None:
    process = subprocess.Popen(
        [*KREX, "bench", "gate", "--siblings=2", "--repeats=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        prefix = f"krex-bench-{process.pid}-"
        wait_until(lambda: any(it.startswith(prefix) for it in directories()), "it has begun")
    finally:
        process.send_signal(number)
        out, err = communicate(process)
    assert (process.returncode, out) == (-number, ""), err


# The demo


@pytest.mark.parametrize(
    ("solo", "ungated", "krex", "per_minute", "failed"),
    [
        (1.0, 0.1, 0.95, 200, []),
        (0.8, 0.1, 0.75, 200, []),
        (1.0, 0.1, 0.85, 200, ["less than 90% of krex's timings are within 5% of solo's"]),
        (1.0, 0.7, 0.95, 200, ["they are not 30 points above ungated's"]),
        (1.0, 0.1, 0.95, 99, ["krex runs no more commands a minute than one at a time"]),
    ],
)
def test_the_demo_says_what_it_did_not_show(
    solo: float, ungated: float, krex: float, per_minute: float, failed: list[str]
) -> None:
    demo = runpy.run_path(str(Path(__file__).parent.parent / "benches" / "demo.py"))
    shares = {"solo": solo, "ungated": ungated, "krex": krex}
    entries = {
        name: {
            "within_5pct": share,
            "commands_per_minute": per_minute if name == "krex" else 100,
            "commands": 36,
            "usable": 36,
        }
        for name, share in shares.items()
    }
    assert demo["failures"](**entries) == failed
    entries["krex"]["usable"] = 35
    assert demo["failures"](**entries) == ["1 of 36 commands broke under krex"]


# The marker


def test_outside_of_the_bench_a_region_is_krex_s(machine_dir: Path) -> None:
    script = (
        "from krex.bench import region\nwith region('x') as timed: pass\nprint(timed.to_dict())\n"
    )
    environment = os.environ | {"KREX_RUNTIME_DIR": str(machine_dir)}
    environment.pop("KREX_BENCH_POLICY", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{'verdict': 'clean', 'reasons': []}\n"


@pytest.mark.parametrize("policy", ["solo", "ungated", "exclusive"])
def test_the_marker_does_nothing_under_other_policies(policy: str, tmp_path: Path) -> None:
    script = (
        "from krex.bench import region\nwith region('x') as timed: pass\nprint(timed.to_dict())\n"
    )
    runtime_dir = tmp_path / "krex"
    environment = os.environ | {"KREX_BENCH_POLICY": policy, "KREX_RUNTIME_DIR": str(runtime_dir)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "{}\n"
    assert not runtime_dir.exists()


@pytest.mark.parametrize("reserved", [None, "", "none", "CPU"])
def test_commands_are_started_alike(bench: Bench, tmp_path: Path, reserved: str | None) -> None:
    log = tmp_path / "log"
    script = (
        f'echo "$(env | wc -c) $KREX_BENCH_POLICY ${{{RESERVED_VARIABLE}-unset}}" '
        f">> {shlex.quote(str(log))}; {prints('k', 1)}"
    )
    if reserved == "CPU":
        reserved = str(max(os.sched_getaffinity(0)))
    command = (
        shell(script)
        if reserved is None
        else shell(script) | {"env": {RESERVED_VARIABLE: reserved}}
    )
    bench.run([command], "--width=2", "--count=2", "--rounds=1")
    sizes, policies, settings = zip(
        *(it.split(" ") for it in log.read_text().splitlines()), strict=True
    )
    assert len(set(sizes)) == 1
    # Only krex has what it needs for its regions.
    for policy, found in zip(policies, settings, strict=True):
        assert found == ("unset" if reserved is None else reserved if policy == "krex" else "none")


def test_region_lock_ends_with_the_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from krex.bench import region

    monkeypatch.setenv("KREX_BENCH_POLICY", "region-lock")
    monkeypatch.setenv("KREX_BENCH_LOCK", str(tmp_path / "lock"))
    with region():
        child = forked_child()
    try:
        with open(tmp_path / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def forked_child() -> int:
    """A child that has all descriptors of this process, and sleeps."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    return child


def test_region_lock_needs_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from krex.bench import region

    monkeypatch.setenv("KREX_BENCH_POLICY", "region-lock")
    monkeypatch.delenv("KREX_BENCH_LOCK", raising=False)
    with pytest.raises(RuntimeError, match="needs a file named by KREX_BENCH_LOCK"), region():
        pass


@pytest.fixture
def machine_dir() -> Iterator[Path]:
    from harness import Machine

    machine = Machine()
    yield machine.runtime_dir
    machine.close()
