"""`krex run`: the command is what it would be without krex (I8), and wrong calls say why."""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import KREX, LIMIT, Machine, is_frozen, is_running, process_state, wait_until

# Prints everything that a process inherits, as JSON.
INHERITED = """
import json, os, resource, signal, sys
def names(mask):
    return sorted(signal.Signals(n).name for n in mask)
ignored = [n for n in signal.Signals if signal.getsignal(n) is signal.SIG_IGN]
status = dict(
    line.split(":\\t", 1)
    for line in open("/proc/self/status").read().splitlines()
    if ":\\t" in line
)
limits = [n for n in dir(resource) if n.startswith("RLIMIT_")]
fds = {}
for name in os.listdir("/proc/self/fd"):
    try:
        fds[name] = os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        pass  # that of the listing itself
json.dump({
    "environ": {k: v for k, v in os.environb_items()} if False else dict(os.environ),
    "argv": sys.argv[1:],
    "cwd": os.getcwd(),
    "umask": status["Umask"],
    "signals": [status[k] for k in ("SigIgn", "SigBlk", "SigCgt", "ShdPnd", "SigPnd")],
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in limits},
    "ids": [status[k] for k in ("Uid", "Gid", "Groups")],
    "caps": [status[k] for k in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs")],
    "fds": fds,
    "ppid": os.getppid(), "pgid": os.getpgid(0), "sid": os.getsid(0),
    "nice": os.nice(0), "affinity": sorted(os.sched_getaffinity(0)),
    "scheduler": os.sched_getscheduler(0),
    "comm": open("/proc/self/comm").read(),
    "threads": status["Threads"],
    "dumpable": os.access("/proc/self/environ", os.R_OK),
    "timerslack": open("/proc/self/timerslack_ns").read(),
    "oom": open("/proc/self/oom_score_adj").read(),
    "personality": open("/proc/self/personality").read(),
}, sys.stdout)
""".replace("{k: v for k, v in os.environb_items()} if False else ", "")

RUN = [KREX, "run", "--"]


def inherited(machine: Machine, launcher: list[str], **options: Any) -> dict[str, Any]:
    command = [*launcher, sys.executable, "-S", "-c", INHERITED, "a b", "", "*", "--device", "x"]
    with machine.start(command, stdout=subprocess.PIPE, **options) as process:
        assert process.stdout is not None
        value: dict[str, Any] = json.loads(process.stdout.read())
    value["fds"].pop("1")
    # A pipe's number differs from run to run.
    assert process.returncode == 0
    return value


def test_nothing_that_a_command_inherits_changes(machine: Machine) -> None:
    reader, writer = os.pipe()

    def prepare() -> None:
        os.umask(0o027)
        os.nice(3)
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGCHLD])
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])

    options: dict[str, Any] = {
        "preexec_fn": prepare,
        "pass_fds": [reader, writer],
        "cwd": "/usr",
        "stdin": subprocess.DEVNULL,
        "env": {"EMPTY": "", "WITH NEWLINE": "a\nb", "LD_LIBRARY_PATH": "", "KREX_LOG": "error"},
    }
    direct = inherited(machine, [], **options)
    through = inherited(machine, RUN, **options)
    os.close(reader)
    os.close(writer)
    assert direct["ppid"] == os.getpid()
    for which in (direct, through):
        # Its own process group: the number is its own process id.
        which.pop("pgid")
    assert through["environ"].pop("LD_PRELOAD").endswith("/lib/krex/libkrex_preload.so")
    assert through == direct


@pytest.mark.parametrize("action", ["SIG_IGN", "SIG_DFL"])
def test_dispositions_are_inherited(machine: Machine, action: str) -> None:
    """SIGPIPE too, which Rust's and Python's start-up code would ignore; and an ignored SIGCHLD."""

    def prepare() -> None:
        for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ, signal.SIGINT):
            signal.signal(number, getattr(signal, action))

    done = machine.run(
        [*RUN, "grep", "SigIgn", "/proc/self/status"], preexec_fn=prepare, restore_signals=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    ignored = int(done.stdout.split()[1], 16)
    for number in (signal.SIGPIPE, signal.SIGCHLD, signal.SIGXFSZ, signal.SIGINT):
        assert bool(ignored & 1 << (number - 1)) == (action == "SIG_IGN"), number


def test_no_process_stays_in_between(machine: Machine) -> None:
    process = machine.start([*RUN, "sh", "-c", "echo $$ $PPID; read _"], **PIPES)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline().split() == [b"%d" % process.pid, b"%d" % os.getpid()]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    assert children == "", "a child of its own would be waited for, or become a zombie"
    pair = machine.supervisor()
    assert pair["pid"] != process.pid
    # The pair: in a session of its own, away from the directory, with nothing of ours open.
    assert os.getsid(pair["pid"]) not in (os.getsid(0), process.pid)
    assert os.readlink(f"/proc/{pair['worker_pid']}/cwd") == "/"
    for pid in (pair["pid"], pair["worker_pid"]):
        open_files = [os.readlink(it) for it in Path(f"/proc/{pid}/fd").iterdir()]
        assert not any(it.startswith("pipe:") for it in open_files), open_files
    process.stdin.close()
    assert process.wait(LIMIT) == 1
    assert process_state(process.pid) is None


PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


def test_the_supervisor_inherits_nothing(machine: Machine, tmp_path: Path) -> None:
    """Neither descriptors (a lock would never be released), nor limits of the command's group."""
    with (tmp_path / "lock").open("w") as file:
        machine.run([*RUN, "true"], pass_fds=[file.fileno()])
        pair = machine.supervisor()
        for pid in (pair["pid"], pair["worker_pid"]):
            open_files = [os.readlink(it) for it in Path(f"/proc/{pid}/fd").iterdir()]
            assert str(tmp_path / "lock") not in open_files
    environment = Path(f"/proc/{pair['worker_pid']}/environ").read_bytes()
    assert b"PATH=" not in environment


# Exit statuses


@pytest.mark.parametrize("status", [0, 1, 2, 125, 126, 127, 128, 130, 255])
def test_the_exit_status_is_the_commands(machine: Machine, status: int) -> None:
    assert machine.krex("run", "--", "sh", "-c", f"exit {status}").returncode == status


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGSEGV", "SIGINT", "SIGPIPE", "SIGABRT"])
def test_death_by_a_signal_is_the_commands(machine: Machine, name: str) -> None:
    done = machine.krex("run", "--", "sh", "-c", f"ulimit -c 0; kill -{name[3:]} $$")
    assert done.returncode == -getattr(signal, name)


def failed(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """One line on standard error that has all the words, and this exit status."""
    assert done.returncode == status, done
    assert done.stdout == ""
    assert done.stderr.startswith("krex: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("command", ["no-such-command", "/no/such/command", "./no-such", ""])
def test_a_command_that_does_not_exist(machine: Machine, command: str) -> None:
    failed(machine.krex("run", "--", command), 127, "not found")
    assert not (machine.runtime_dir / "segment").exists()


def test_a_command_that_cannot_be_executed(machine: Machine, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    failed(machine.krex("run", "--", plain), 126, "Permission denied", str(plain))
    failed(machine.krex("run", "--", tmp_path), 126, "Permission denied")
    plain.chmod(0o755)
    plain.write_text("#!/no/such/interpreter\n")
    # What execve says is passed on, and the slot is given back at once.
    done = machine.krex("run", "--", plain)
    failed(done, 127)
    plain.write_text(f"#!{tmp_path}\n")
    failed(machine.krex("run", "--", plain), 126, "Permission denied")
    assert machine.tenants() == {}


def test_a_script_without_an_interpreter_line_runs(machine: Machine, tmp_path: Path) -> None:
    script = tmp_path / "a script"
    script.write_text('echo "$0" "$@"\n')
    script.chmod(0o755)
    done = machine.krex("run", "--", script, "x y")
    assert (done.returncode, done.stdout) == (0, f"{script} x y\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command"),
        (["--"], "no command"),
        (["--device"], "--device"),
        (["--device", "gpu", "true"], "gpu"),
        (["--device", "cpu:a b", "true"], "cpu:NAME"),
        (["--device", "", "true"], "cpu:NAME"),
        (["--no-such", "true"], "--no-such"),
        (["--name", "", "true"], "--name"),
        (["--timeout", "-1", "true"], "--timeout"),
        (["--timeout", "0", "true"], "--timeout"),
        (["--timeout", "nan", "true"], "--timeout"),
        (["--timeout", "inf", "true"], "--timeout"),
        (["--timeout", "1e300", "true"], "--timeout"),
        (["--timeout", "soon", "true"], "--timeout"),
        (["--timeout", "", "true"], "--timeout"),
        (["--name", os.fsdecode(b"\xff\xfe"), "true"], "--name"),
    ],
)
def test_a_wrong_command_line_is_status_2(machine: Machine, words: Any, message: str) -> None:
    failed(machine.krex("run", *words), 2, message)
    assert not (machine.runtime_dir / "segment").exists()


def test_a_wrong_freezer_is_named(machine: Machine) -> None:
    done = machine.krex("run", "--", "true", env={"KREX_FREEZER": "v1"})
    failed(done, 2, "KREX_FREEZER", "auto, cgroup2 or sigstop")
    code = "import krex.region as r\nwith r.critical(): pass"
    done = machine.run([sys.executable, "-c", code], env={"KREX_FREEZER": "v1"})
    assert "ValueError: KREX_FREEZER" in done.stderr


@pytest.mark.parametrize("value", ["abc", "0", "-1", "nan", "inf", " 1"])
def test_a_wrong_limit_of_closed_time_is_named(machine: Machine, value: str) -> None:
    done = machine.krex("run", "--", "true", env={"KREX_MAX_CLOSED": value})
    failed(done, 2, "KREX_MAX_CLOSED", "a positive number of seconds")
    assert not (machine.runtime_dir / "segment").exists()


def test_help_is_no_error(machine: Machine) -> None:
    done = machine.krex("run", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--timeout" in done.stdout


# Names and words


@pytest.mark.parametrize(
    "name", ["a b", "(a) b)", ") R 1 1 (", "two\nlines", "tab\t", "評価", "x" * 300, "-", "%s"]
)
def test_any_name(machine: Machine, name: str) -> None:
    holder = machine.actor("--name", name)
    (shown,) = [it["name"] for it in machine.status()["tenants"]]
    assert name.startswith(shown)
    assert len(shown) >= min(len(name), 40)
    sibling = machine.actor()
    sibling.do("hold")
    assert is_frozen(holder.pid)
    report = sibling.do("leave")
    assert [it["name"] for it in report["siblings"]] == [shown]
    text = machine.krex("status").stdout
    assert all(line.isprintable() for line in text.splitlines())


def test_a_program_with_an_odd_name_is_frozen(freezing_machine: Machine, tmp_path: Path) -> None:
    """The name stands in /proc/PID/stat, between parentheses, as it is."""
    machine = freezing_machine
    program = tmp_path / ") R 1 (x\n) "
    program.symlink_to(sys.executable)
    code = "import os, sys\nos.fork()\nos.write(1, b'ready\\n')\nsys.stdin.read()\n"
    odd = machine.start([*RUN, program, "-c", code], **PIPES)
    assert odd.stdout is not None
    assert [odd.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
    (child,) = children_of(odd.pid)
    holder = machine.actor()
    holder.do("hold")
    assert is_frozen(odd.pid)
    assert is_frozen(child)
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    machine.pids |= {odd.pid, child}
    wait_until(machine.nobody_is_frozen)
    odd.communicate(b"")


def children_of(pid: int) -> list[int]:
    return [int(it) for it in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_words_that_are_not_utf_8(machine: Machine) -> None:
    odd = os.fsdecode(b"\xff\xfe \x80)")
    code = "import os, sys; print(os.fsencode(sys.argv[1]).hex()); print(flush=True); input()"
    process = machine.start([*RUN, sys.executable, "-c", code, odd], **PIPES)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == b"\xff\xfe \x80)".hex().encode()
    assert machine.krex("status", "--json").returncode == 0
    process.communicate(b"\n")
    process = machine.start([*RUN, "sh", "-c", "echo; read _", odd], **PIPES, env={"X": odd})
    assert process.stdout is not None
    process.stdout.readline()
    (tenant,) = machine.status()["tenants"]
    assert tenant["pid"] == process.pid
    process.communicate(b"\n")


# Descriptors


def test_every_choice_of_closed_standard_streams(machine: Machine) -> None:
    """Whatever gets their numbers must not be what somebody then reads or writes."""
    for closed in itertools.chain.from_iterable(
        itertools.combinations((0, 1, 2), count) for count in (1, 2, 3)
    ):
        fresh = Machine()
        try:

            def close(closed: tuple[int, ...] = closed) -> None:
                for number in closed:
                    os.close(number)

            command = [*RUN, "sh", "-c", "echo out; echo err >&2; ls -l /proc/self/fd >&2; exit 7"]
            process = fresh.start(
                command,
                preexec_fn=close,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={"KREX_LOG": "trace"},
            )
            out, errors = process.communicate(timeout=LIMIT)
            assert process.returncode == 7, (closed, errors)
            assert (out == b"out\n") == (1 not in closed), closed
            assert b"segment" not in errors, (closed, errors)
            assert fresh.status()["version"] is not None, closed
            # It can be used, also by one that was started like this.
            code = "import krex.region as r\nwith r.critical() as c: pass\nassert c.report\n"
            process = fresh.start(
                [*RUN, sys.executable, "-c", code], preexec_fn=close, stdin=subprocess.DEVNULL
            )
            assert process.wait(LIMIT) == 0, closed
            pair = fresh.supervisor()
            for pid in (pair["pid"], pair["worker_pid"]):
                for number in (0, 1, 2):
                    assert os.readlink(f"/proc/{pid}/fd/{number}") == "/dev/null", closed
        finally:
            fresh.close()


def test_a_command_that_closes_all_descriptors(freezing_machine: Machine) -> None:
    machine = freezing_machine
    code = """
import os, time
import krex.region as region
with region.critical():
    pass
os.closerange(3, 4096)
# Whatever takes the numbers of krex's files.
files = [open("/dev/null", "wb", buffering=0) for _ in range(20)]
print("closed", flush=True)
input()
with region.critical() as timed:
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        pass
print(timed.report.verdict, len(timed.report.siblings), flush=True)
input()
"""
    closer = machine.start([*RUN, sys.executable, "-c", code], **PIPES)
    assert closer.stdin is not None
    assert closer.stdout is not None
    assert closer.stdout.readline() == b"closed\n"
    sibling = machine.actor()
    sibling.do("hold")
    assert is_frozen(closer.pid)
    assert sibling.do("leave")["verdict"] == "clean"
    closer.stdin.write(b"\n")
    closer.stdin.flush()
    assert closer.stdout.readline() == b"clean 1\n"
    closer.communicate(b"\n")


# Tenants in tenants


@pytest.mark.parametrize("command", ["exec", "child"])
def test_krex_run_inside_krex_run(freezing_machine: Machine, command: str) -> None:
    machine = freezing_machine
    inner = ["--name", "inner", "--device", "cpu:in", "--device", "cpu", "--"]
    wrapper = [KREX, "run", "--name", "outer", "--"]
    if command == "child":
        wrapper += ["sh", "-c", '"$@"; exit $?', "sh"]
    actor = machine.actor(*inner[:-1], wrapper=wrapper)
    names = {it["name"]: it for it in machine.status()["tenants"]}
    assert actor.pid == names["inner"]["pid"]
    assert names["inner"]["devices"] == ["cpu", "cpu:in"]
    if command == "exec":
        assert set(names) == {"inner"}
        assert actor.pid == actor.process.pid
    else:
        assert names["inner"]["parent"] == "outer"
        assert names["outer"]["pid"] == actor.process.pid
    sibling = machine.actor()
    sibling.do("hold")
    for tenant in names.values():
        assert is_frozen(tenant["pid"])
    assert sibling.do("leave")["verdict"] == "clean"
    actor.do("hold", device="cpu")
    assert not is_frozen(actor.process.pid), "an ancestor of the holder reads its output"
    assert is_frozen(sibling.pid)
    report = actor.do("leave")
    assert report["verdict"] == "clean", report
    assert actor.quit() == 0


def test_eight_bare_children_of_one_shell_exclude_each_other(freezing_machine: Machine) -> None:
    """Each splits off from the shell's tenant at its first region."""
    machine = freezing_machine
    code = """
import json, os, sys, time
import krex.region as region
spans = []
verdicts = []
for _ in range(3):
    with region.critical() as timed:
        start = time.monotonic()
        while time.monotonic() < start + 0.01:
            pass
        spans.append((start, time.monotonic()))
    verdicts.append([timed.report.verdict, *timed.report.reasons])
os.write(1, json.dumps([os.getpid(), spans, verdicts]).encode() + b"\\n")
"""
    script = 'for i in 1 2 3 4 5 6 7 8; do "$0" -c "$1" & done; wait'
    done = machine.krex("run", "--", "sh", "-c", script, sys.executable, code)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({pid for pid, _, _ in lines}) == 8
    spans = sorted(tuple(span) for _, spans, _ in lines for span in spans)
    assert len(spans) == 24
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans)), spans
    disturbed = [it for _, _, verdicts in lines for it in verdicts if it[0] == "contended"]
    assert disturbed == []


@pytest.mark.parametrize("which", ["reader", "writer"])
def test_a_pipeline_with_a_region_at_one_end(freezing_machine: Machine, which: str) -> None:
    """`krex run a | krex run b`: the one is frozen while the other times; then both go on."""
    machine = freezing_machine
    region = """
import krex.region as region, sys, time
with region.critical() as timed:
    end = time.monotonic() + 0.05
    while time.monotonic() < end:
        pass
print(timed.report.verdict, [it.name for it in timed.report.siblings], file=sys.stderr)
"""
    # Not through sys.stdout: unbuffered, it loses what a write that was cut short left over.
    write = """
import os
data = b"x" * 300000
while data:
    data = data[os.write(1, data):]
"""
    read = "import sys\nprint(len(sys.stdin.read()))\n"
    first, second = write, read
    if which == "reader":
        second = (
            "import sys\nhead = sys.stdin.read(1)\n" + region + "print(1 + len(sys.stdin.read()))"
        )
    else:
        first = region + write
    script = (
        f"""'{KREX}' run --name one -- "$0" -c "$1" | '{KREX}' run --name two -- "$0" -c "$2" """
    )
    done = machine.run(["sh", "-c", script, sys.executable, first, second])
    assert (done.returncode, done.stdout) == (0, "300000\n")
    verdict = done.stderr.split()[0]
    assert verdict == "clean", done.stderr


def test_a_daemon_goes_on_and_is_frozen(freezing_machine: Machine) -> None:
    """It leaves its parents and its session; seen before (SIGSTOP), or in its group (cgroup)."""
    machine = freezing_machine
    code = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    time.sleep(float(sys.argv[1]))
    os._exit(0)
os.wait()
sys.stdin.read(1)
"""
    # The tree is looked at once a second.
    delay = "1.5" if machine.freezer == "sigstop" else "0"
    process = machine.start([*RUN, sys.executable, "-c", code, delay], **PIPES)
    assert process.stdout is not None
    daemon = int(process.stdout.readline())
    machine.pids.add(daemon)
    wait_until(lambda: len(children_of(process.pid)) == 0, "it is a daemon")
    holder = machine.actor()
    holder.do("hold")
    assert is_frozen(daemon)
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    # Its root ends; the tenant is there as long as anybody of it is.
    wait_until(machine.nobody_is_frozen)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(LIMIT)
    holder.do("hold")
    assert is_frozen(daemon), machine.status()
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    assert is_running(daemon)
    wait_until(machine.nobody_is_frozen)
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: process.pid not in machine.tenants())


# The time limit


def test_a_time_limit_ends_the_command(freezing_machine: Machine) -> None:
    machine = freezing_machine
    script = "trap 'exit 9' TERM; while :; do sleep 0.05; done"
    done = machine.krex("run", "--timeout", "0.3", "--", "sh", "-c", script)
    assert done.returncode == 9
    done = machine.krex("run", "--timeout", "0.3", "--", "sleep", "60")
    assert done.returncode == -signal.SIGTERM
    assert machine.krex("run", "--timeout", "30", "--", "true").returncode == 0


def test_a_time_limit_kills_what_does_not_listen(freezing_machine: Machine) -> None:
    machine = freezing_machine
    script = "trap '' TERM; sleep 60 & while :; do sleep 0.05; done"
    done = machine.krex("run", "--timeout", "0.2", "--", "sh", "-c", script)
    assert done.returncode == -signal.SIGKILL


def test_a_time_limit_does_not_count_frozen_or_queued_time(machine: Machine) -> None:
    """They live on past an age of their limit; then what is left of it is counted."""
    holder = machine.actor()
    frozen = machine.actor("--timeout", "3")
    queued = machine.actor("--timeout", "3")
    holder.do("hold")
    queued.send("whole")
    holder.do("spin", seconds=3.5)
    for actor in (frozen, queued):
        assert machine.tenants()[actor.pid]["age_s"] > 3.4
    assert machine.tenants()[frozen.pid]["excluded_s"] >= 3.4
    holder.do("leave")
    assert frozen.do("ping") == frozen.pid
    queued.answer()
    assert frozen.process.wait(LIMIT) == -signal.SIGTERM
    assert queued.process.wait(LIMIT) == -signal.SIGTERM


# Admission


def test_a_command_waits_for_the_end_of_a_running_region(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder = machine.actor()
    holder.do("hold")
    start = machine.start([*RUN, "sh", "-c", "date +%s.%N"], stdout=subprocess.PIPE)
    holder.do("spin", seconds=0.3)
    assert start.poll() is None
    ended = time.time()
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    out, _ = start.communicate(timeout=LIMIT)
    assert float(out) >= ended


def test_nothing_of_a_failed_start_is_left(machine: Machine, tmp_path: Path) -> None:
    """A waiting command that is killed gives its slot and its group back."""
    holder = machine.actor()
    holder.do("hold")
    start = machine.start([*RUN, "true"])
    wait_until(lambda: start.pid in machine.tenants())
    start.kill()
    start.wait(LIMIT)
    holder.do("spin", seconds=0.1)
    holder.do("leave")
    wait_until(lambda: set(machine.tenants()) == {holder.pid})
