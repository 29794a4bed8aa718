"""What cannot work is refused by name, with the remedy, and leaves nothing behind.

Arguments of the Python calls: cases.py, `bad_arguments`. Words of `krex run`: test_run.py.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from harness import KREX, Machine, cgroup_mount, is_frozen, wait_until

ENTER = """
import krex.region as region
try:
    with region.critical(timeout=20):
        print("entered")
except Exception as error:
    print(type(error).__name__, isinstance(error, OSError), error)
"""


def privately(setup: str, *command: str) -> list[str]:
    """The command in a mount namespace of its own that `setup` has changed."""
    return ["unshare", "--mount", "sh", "-ec", f'{setup}\nexec "$@"', "sh", *command]


def refused(machine: Machine, setup: str, *words: str, error: str = "SegmentError") -> None:
    """Both `krex run` and a region say all the words; nothing of them runs."""
    run = privately(setup, KREX, "run", "--", "echo", "it ran")
    done = machine.run(run)
    assert (done.returncode, done.stdout) == (125, ""), done
    assert done.stderr.startswith("krex: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    done = machine.run(privately(setup, sys.executable, "-c", ENTER))
    assert done.stdout.startswith(f"{error} True "), done
    for word in words:
        assert word in done.stdout


def mount(machine: Machine, options: str) -> str:
    return f"mount -t tmpfs -o mode=700,{options} tmpfs {shlex.quote(str(machine.runtime_dir))}"


# The runtime directory


def test_a_runtime_directory_that_is_not_writable(machine: Machine) -> None:
    refused(machine, mount(machine, "ro"), "Read-only", "KREX_RUNTIME_DIR")


def test_a_runtime_directory_that_is_full(machine: Machine) -> None:
    """The segment is allocated whole: an error now instead of a SIGBUS later."""
    refused(machine, mount(machine, "size=64k"), "No space left", "KiB", "KREX_RUNTIME_DIR")


def test_a_runtime_directory_that_cannot_be_made(machine: Machine) -> None:
    machine.environment["KREX_RUNTIME_DIR"] = str(machine.runtime_dir / "no" / "such")
    refused(machine, ":", "cannot be made", "KREX_RUNTIME_DIR")
    machine.environment["KREX_RUNTIME_DIR"] = "/proc/krex"
    refused(machine, ":", "cannot be made", "KREX_RUNTIME_DIR")


def test_a_runtime_directory_that_others_may_use(machine: Machine) -> None:
    machine.runtime_dir.chmod(0o750)
    refused(machine, ":", "mode 0750", f"chmod 0700 {machine.runtime_dir}")
    machine.runtime_dir.chmod(0o700)
    os.chown(machine.runtime_dir, 54322, 54322)
    refused(machine, ":", "belongs to user 54322", "KREX_RUNTIME_DIR")
    os.chown(machine.runtime_dir, os.getuid(), os.getgid())


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_runtime_directory_that_is_none(machine: Machine, kind: str) -> None:
    path = machine.runtime_dir / "it"
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(machine.runtime_dir)
    machine.environment["KREX_RUNTIME_DIR"] = str(path)
    refused(machine, ":", "is not a directory", "Set KREX_RUNTIME_DIR")
    path.unlink()


def test_a_segment_that_is_removed_under_its_users(machine: Machine) -> None:
    """The region that runs ends as it should; the next one makes another segment."""
    holder, sibling = machine.actor(), machine.actor()
    holder.do("hold")
    (machine.runtime_dir / "segment").unlink()
    assert is_frozen(sibling.pid)
    report = holder.do("leave")
    assert report["verdict"] == "unknown", report
    assert any("removed or replaced" in reason for reason in report["reasons"])
    wait_until(lambda: not is_frozen(sibling.pid))
    holder.do("hold")
    assert holder.do("leave")["device"] == "cpu"
    assert sibling.do("ping") == sibling.pid
    assert sibling.quit() == 0
    assert holder.quit() == 0
    # Nobody knows the groups of the old one any more, except by their names.
    wait_until(lambda: not machine.tenants())
    assert machine.krex("recover").returncode == 0
    assert machine.groups() == []


# The segment


@pytest.mark.parametrize("damage", ["magic", "short", "long", "empty", "mode", "owner", "link"])
def test_a_segment_that_is_none(machine: Machine, damage: str) -> None:
    segment = machine.runtime_dir / "segment"
    assert machine.krex("run", "--", "true").returncode == 0
    wait_until(lambda: not machine.tenants())
    # A copy under the same name: the pair that still runs has the sound one, and ends with it.
    content = segment.read_bytes()
    segment.unlink()
    if damage == "magic":
        content = b"something else".ljust(len(content), b"\0")
    elif damage == "short":
        content = content[:4096]
    elif damage == "long":
        content += b"\0"
    elif damage == "empty":
        content = b""
    segment.write_bytes(content)
    segment.chmod(0o600 if damage != "mode" else 0o644)
    words = ["segment", "recover --purge"]
    if damage == "mode":
        words = ["mode 0644", f"chmod 0600 {segment}"]
    elif damage == "owner":
        os.chown(segment, 54322, -1)
        words = ["belongs to user 54322"]
    elif damage == "link":
        segment.rename(machine.runtime_dir / "other")
        segment.symlink_to(machine.runtime_dir / "other")
        words = ["cannot be opened", f"rm -r {segment}"]
    refused(machine, ":", *words)
    assert machine.krex("status").returncode == 125
    if damage == "link":
        (machine.runtime_dir / "other").unlink()
    done = machine.krex("recover", "--purge")
    assert done.returncode == 0, done
    assert machine.krex("run", "--", "true").returncode == 0
    assert machine.krex("status").returncode == 0


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x55])
def test_a_segment_full_of_nonsense_is_never_a_crash(machine: Machine, byte: int) -> None:
    """A sound header, and rubbish behind it: no index or length is believed unchecked."""
    segment = machine.runtime_dir / "segment"
    assert machine.krex("run", "--", "true").returncode == 0
    wait_until(lambda: not machine.tenants())
    content = segment.read_bytes()
    header = content[:64]
    segment.unlink()
    segment.write_bytes(header + bytes([byte]) * (len(content) - len(header)))
    segment.chmod(0o600)
    for command in (
        [KREX, "status", "--json"],
        [KREX, "status"],
        [KREX, "doctor"],
        [KREX, "recover"],
        [KREX, "run", "--", "true"],
        [sys.executable, "-c", ENTER.replace("20", "0.5")],
    ):
        done = machine.run(command, timeout=45)
        assert done.returncode in (0, 1, 125), (command, done)
        assert "panicked" not in done.stderr, (command, done)
        assert "Traceback" not in done.stderr, (command, done)
    done = machine.krex("recover", "--purge")
    assert done.returncode == 0, done
    assert machine.krex("run", "--", "true").returncode == 0


# Freezers


def read_only_cgroups() -> str:
    return f"mount -o remount,ro,bind {shlex.quote(str(cgroup_mount()))}"


def test_no_rights_to_make_cgroups(machine: Machine) -> None:
    """Asked for by name it is an error that says what helps, and no slot stays taken."""
    machine.environment["KREX_FREEZER"] = "cgroup2"
    setup = read_only_cgroups()
    words = ["KREX_FREEZER=cgroup2", "Delegate=yes", "KREX_FREEZER=auto", "Read-only"]
    refused(machine, setup, *words, error="OSError")
    wait_until(lambda: not machine.tenants())
    assert machine.groups() == []


def test_no_cgroups_at_all(machine: Machine) -> None:
    machine.environment["KREX_FREEZER"] = "cgroup2"
    setup = f"umount -l {shlex.quote(str(cgroup_mount()))}"
    done = machine.run(privately(setup, KREX, "run", "--", "true"))
    assert done.returncode == 125
    assert "KREX_FREEZER=auto" in done.stderr
    assert machine.tenants() == {}


@pytest.mark.parametrize("setup", ["read-only", "unmounted"])
def test_auto_falls_back_to_sigstop(machine: Machine, setup: str) -> None:
    command = read_only_cgroups()
    if setup == "unmounted":
        command = f"umount -l {shlex.quote(str(cgroup_mount()))}"
    # The supervisor comes from there too, as it would in a container.
    sibling = machine.actor(wrapper=privately(command))
    assert machine.tenants()[sibling.pid]["freezer"] == "sigstop"
    holder = machine.actor(wrapper=privately(command))
    holder.do("hold")
    assert is_frozen(sibling.pid)
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    assert report["freezer"] == "sigstop"
    assert report["siblings"][0]["frozen"] == "sigstop"
    wait_until(machine.nobody_is_frozen)


# Commands


def test_nothing_is_frozen_or_leaked_by_what_was_refused(machine: Machine, tmp_path: Path) -> None:
    sibling = machine.actor()
    before = machine.status()
    for command in (
        [KREX, "run", "--", "/no/such"],
        [KREX, "run", "--", str(tmp_path)],
        [KREX, "run", "--device", "gpu", "--", "true"],
        [KREX, "run", "--timeout", "nan", "--", "true"],
    ):
        assert machine.run(command).returncode != 0
    actor = machine.actor(bare=True)
    actor.call("bad_arguments")
    assert actor.quit() == 0
    wait_until(lambda: set(machine.tenants()) == {sibling.pid})
    after = machine.status()
    assert [it["name"] for it in after["devices"]] == [it["name"] for it in before["devices"]]
    assert machine.nobody_is_frozen()


def test_an_unknown_log_level_is_said_and_warnings_stay(machine: Machine) -> None:
    result = machine.krex("run", "--", "true", env={"KREX_LOG": "loud"})
    assert result.returncode == 0
    assert 'KREX_LOG is "loud"; use off, error, warn, info, debug or trace' in result.stderr
    assert machine.krex("run", "--", "true", env={"KREX_LOG": "off"}).stderr == ""
