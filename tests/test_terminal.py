"""Job control in a real terminal, typed into an interactive shell (I8)."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from harness import KREX, LIMIT, Machine, is_frozen, process_state, wait_until

PROMPT = "READY[0-9]+> "

# Says who it is, and waits in a way that shows whether it runs.
COMMAND = """
import os, sys, time
print("pid", os.getpid(), "=", flush=True)
for line in sys.stdin:
    print("got", line.strip(), flush=True)
    if line.strip() == "end":
        sys.exit(7)
"""

# A holder that spins in its region until it is told to leave, by a file.
HOLDER = """
import os, sys, time
import krex.region as region
with region.critical() as timed:
    print("pid", os.getpid(), "=", flush=True)
    while not os.path.exists(sys.argv[1]):
        pass
print("verdict", timed.report.verdict, timed.report.reasons, flush=True)
"""


class Shell:
    """An interactive bash in a terminal of its own."""

    def __init__(self, machine: Machine, directory: Path) -> None:
        self.machine = machine
        (directory / "command.py").write_text(COMMAND)
        (directory / "holder.py").write_text(HOLDER)
        self.directory = directory
        self.count = 0
        self.child = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile", "-i"],
            env=dict(machine.environment, TERM="dumb", LC_ALL="C", HISTFILE=""),
            cwd=str(directory),
            timeout=LIMIT,
            encoding="utf-8",
            echo=False,
            dimensions=(50, 300),
        )
        self.child.sendline("bind 'set enable-bracketed-paste off' 2>/dev/null; set +m; set -m")
        self.prompt()

    def prompt(self) -> str:
        """Wait for a prompt of its own; return what came before it."""
        self.count += 1
        self.child.sendline(f"PS1='READY'{self.count}'> '")
        self.child.expect(f"READY{self.count}> ")
        return str(self.child.before)

    def run(self, line: str) -> str:
        """Type a command that ends by itself; return its output."""
        self.child.sendline(line)
        return self.after()

    def start(self, line: str) -> int:
        """Type a command that says its process id."""
        self.child.sendline(line)
        self.child.expect(r"pid ([0-9]+) =")
        pid = int(self.child.match.group(1))
        self.machine.pids.add(pid)
        return pid

    def after(self) -> str:
        """What is printed until the shell has the terminal again."""
        self.child.expect(f"READY{self.count}> ")
        return str(self.child.before)

    def status(self) -> int:
        found = re.search("status=([0-9]+);", self.run('echo "status=$?;"'))
        assert found
        return int(found[1])

    def krex(self, script: str, *words: str) -> str:
        return f"'{KREX}' run --name {script} -- '{sys.executable}' {script}.py {' '.join(words)}"


@pytest.fixture
def shell(machine: Machine, tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(machine, tmp_path)
    yield shell
    for pid in machine.pids:
        if process_state(pid) is not None:
            os.kill(pid, signal.SIGKILL)
    shell.child.close(force=True)


def test_ctrl_c_is_130(shell: Shell) -> None:
    pid = shell.start(shell.krex("command"))
    shell.child.sendintr()
    shell.after()
    assert shell.status() == 130
    wait_until(lambda: process_state(pid) is None)


def test_a_command_in_the_foreground_has_the_terminal(shell: Shell) -> None:
    shell.start(shell.krex("command"))
    shell.child.sendline("hello")
    shell.child.expect("got hello")
    shell.child.sendline("end")
    shell.after()
    assert shell.status() == 7
    assert shell.run("jobs") == ""


def test_ctrl_backslash_is_131(shell: Shell) -> None:
    shell.run("ulimit -c 0")
    shell.start(shell.krex("command"))
    shell.child.send("\x1c")
    shell.after()
    assert shell.status() == 131


def test_ctrl_z_and_fg(shell: Shell) -> None:
    pid = shell.start(shell.krex("command"))
    shell.child.sendcontrol("z")
    assert "Stopped" in shell.after()
    assert shell.status() == 148
    assert process_state(pid) == "T"
    assert "Stopped" in shell.run("jobs")
    # A region of somebody else's leaves it as it is.
    holder = shell.machine.actor()
    holder.do("hold")
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    assert process_state(pid) == "T"
    shell.child.sendline("fg")
    wait_until(lambda: process_state(pid) != "T")
    shell.child.sendline("again")
    shell.child.expect("got again")
    shell.child.sendintr()
    shell.after()
    assert shell.status() == 130


def test_bg_and_wait(shell: Shell) -> None:
    line = shell.krex("command").replace("command.py", "command.py < /dev/null")
    shell.start(line + " &")
    shell.run("wait %1; true")
    assert shell.run("jobs") == ""


def test_ctrl_z_of_a_holder_frees_its_siblings(shell: Shell, tmp_path: Path) -> None:
    """It runs on no CPU: siblings are thawed; and it goes on with fg, if nobody waited."""
    sibling = shell.machine.actor()
    leave = tmp_path / "leave"
    pid = shell.start(shell.krex("holder", str(leave)))
    assert is_frozen(sibling.pid)
    shell.child.sendcontrol("z")
    assert "Stopped" in shell.after()
    assert sibling.do("ping") == sibling.pid
    assert shell.machine.device()["phase"] == "held"
    leave.touch()
    shell.child.sendline("fg")
    shell.child.expect("verdict contended")
    assert "holder waited" in shell.after()
    assert shell.status() == 0
    wait_until(lambda: process_state(pid) is None)


def test_ctrl_z_of_a_holder_lets_waiters_go_on(shell: Shell, tmp_path: Path) -> None:
    waiter = shell.machine.actor()
    leave = tmp_path / "leave"
    shell.start(shell.krex("holder", str(leave)))
    waiter.send("hold")
    shell.child.sendcontrol("z")
    shell.after()
    waiter.answer()
    assert waiter.do("leave_anyhow")["verdict"] in ("clean", "contended")
    leave.touch()
    shell.child.sendline("fg")
    shell.child.expect("RegionRevoked")
    shell.after()
    assert shell.status() == 1
    wait_until(shell.machine.nobody_is_frozen)


def test_ctrl_z_of_a_frozen_sibling(shell: Shell) -> None:
    """It stops when it is thawed, and fg continues it."""
    holder = shell.machine.actor()
    pid = shell.start(shell.krex("command"))
    holder.do("hold")
    holder.send("spin", seconds=0.5)
    assert is_frozen(pid)
    shell.child.sendcontrol("z")
    holder.answer()
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    assert "Stopped" in shell.after()
    assert process_state(pid) == "T"
    shell.child.sendline("fg")
    wait_until(lambda: process_state(pid) != "T")
    shell.child.sendline("end")
    shell.child.expect("got end")
    shell.after()
    assert shell.status() == 7


def test_ctrl_c_of_a_frozen_sibling(shell: Shell) -> None:
    """It comes as soon as the region is over."""
    holder = shell.machine.actor()
    shell.start(shell.krex("command"))
    holder.do("hold")
    shell.child.sendintr()
    holder.do("spin", seconds=0.1)
    holder.do("leave")
    shell.after()
    assert shell.status() == 130


def test_ctrl_c_while_waiting_for_a_region_to_end(shell: Shell) -> None:
    """The launcher itself: it has the caller's dispositions."""
    holder = shell.machine.actor()
    holder.do("hold")
    holder.send("spin", seconds=1.0)
    shell.child.sendline(shell.krex("command"))
    wait_until(lambda: len(shell.machine.tenants()) == 2)
    shell.child.sendintr()
    shell.after()
    assert shell.status() == 130
    holder.answer()
    holder.do("leave_anyhow")
    wait_until(lambda: set(shell.machine.tenants()) == {holder.pid})


def test_ctrl_c_of_a_holder_frees_everybody(shell: Shell, tmp_path: Path) -> None:
    sibling = shell.machine.actor()
    shell.start(shell.krex("holder", str(tmp_path / "never")))
    assert is_frozen(sibling.pid)
    shell.child.sendintr()
    assert "KeyboardInterrupt" in shell.after()
    assert shell.status() == 130
    wait_until(shell.machine.nobody_is_frozen)
    assert shell.machine.device()["phase"] == "open"


def test_a_pipeline_is_one_job(shell: Shell) -> None:
    line = f"{shell.krex('command')} | '{KREX}' run -- cat"
    pid = shell.start(line)
    shell.child.sendcontrol("z")
    assert "Stopped" in shell.after()
    assert process_state(pid) == "T"
    shell.child.sendline("fg")
    wait_until(lambda: process_state(pid) != "T")
    shell.child.sendline("end")
    shell.child.expect("got end")
    shell.after()
    assert shell.status() == 0


def test_the_end_of_the_terminal_ends_the_command(shell: Shell) -> None:
    """SIGHUP reaches it; the supervisor, which is in no terminal, gives its slot back."""
    pid = shell.start(shell.krex("command"))
    pair = shell.machine.supervisor()
    for half in (pair["pid"], pair["worker_pid"]):
        fields = Path(f"/proc/{half}/stat").read_text().rpartition(")")[2].split()
        assert int(fields[4]) == 0, "no controlling terminal"
    shell.child.close(force=True)
    wait_until(lambda: process_state(pid) is None)
    wait_until(lambda: not shell.machine.tenants())
