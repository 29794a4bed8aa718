"""`krex doctor` on real machines that were broken on purpose: in private mount namespaces, as
another user, with runtime directories that are wrong in each way. Where a finding has a remedy
that can be carried out here, it is, and the finding must be gone."""

from __future__ import annotations

import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import pytest
from krex import _cgroups, _krex, _native, _procfs, _segments, doctor
from krex._findings import Finding, Machine

PACKAGE = Path(doctor.__file__).parent
NOBODY = 65534
DOCTOR = f"{shlex.quote(sys.executable)} -m krex doctor --json"
CHECKED = {
    "kernel",
    "kernel.futex_waitv",
    "proc",
    "cgroup.mount",
    "cgroup.rights",
    "freezer",
    "runtime-dir",
    "runtime-dir.filesystem",
    "segment",
    "other-runtime-dirs",
    "frozen-cgroups",
    "cpus",
    "reserved-cpus",
    "max-closed",
    "bench-directories",
    "native-program",
}


@pytest.fixture
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="krex-test-", dir="/dev/shm"))
    monkeypatch.setenv("KREX_RUNTIME_DIR", str(directory))
    monkeypatch.delenv("KREX_FREEZER", raising=False)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def own_cgroup() -> Path:
    return Path(_cgroups.own_directory(_procfs.mounts()))


def run_check(check: doctor.Check, **environ: str) -> list[Finding]:
    return list(check(Machine(environ)))


def by_id(report: dict[str, Any], identifier: str) -> dict[str, Any]:
    (finding,) = [entry for entry in report["findings"] if entry["id"] == identifier]
    return dict(finding)


def doctors(script: str, *flags: str) -> list[dict[str, Any]]:
    """Run a shell script in new namespaces; return the reports of the doctors that it ran."""
    done = subprocess.run(
        ["unshare", "--mount", *flags, "sh", "-ec", script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.returncode == 0
    decoder, reports, rest = json.JSONDecoder(), [], done.stdout.lstrip()
    while rest:
        report, end = decoder.raw_decode(rest)
        reports.append(report)
        rest = rest[end:].lstrip()
    return reports


def remedied(setup: str, identifier: str, *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Break a private machine with `setup`, let the doctor's remedy mend it; before and after."""
    remedy = (
        "import json, sys;"
        "[print(f['remedy']) for f in json.load(sys.stdin)['findings'] if f['id'] == sys.argv[1]]"
    )
    script = f"""
        {setup}
        report=$({DOCTOR} || true)
        printf '%s\\n' "$report"
        remedy=$(printf '%s' "$report" | {shlex.quote(sys.executable)} -c "{remedy}" {identifier})
        eval "$remedy"
        {DOCTOR} || true
    """
    before, after = doctors(script, *flags)
    return by_id(before, identifier), by_id(after, identifier)


def as_user(user: int, action: Callable[[], list[Finding]]) -> list[Finding]:
    """Return what `action` returns when a child that changed to another user calls it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(action(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    findings: list[Finding] = pickle.loads(data)
    return findings


# The report as a whole


def test_every_check_reports(runtime_dir: Path) -> None:
    findings = doctor.examine()
    assert {finding.id for finding in findings} == CHECKED
    assert {identifier for identifier, _ in doctor.CHECKS} == CHECKED
    for finding in findings:
        assert finding.message
        assert "\n" not in finding.message
        assert "could not be checked" not in finding.message


def test_examining_leaves_nothing_behind(runtime_dir: Path) -> None:
    runtime_dir.rmdir()
    groups = sorted(path for path in own_cgroup().iterdir() if path.is_dir())
    doctor.examine()
    assert sorted(path for path in own_cgroup().iterdir() if path.is_dir()) == groups
    assert not runtime_dir.exists()


@pytest.mark.parametrize(("level", "status"), [("ok", 0), ("error", 1)])
def test_the_exit_status_says_whether_there_is_an_error(
    runtime_dir: Path, level: str, status: int
) -> None:
    runtime_dir.chmod(0o700 if level == "ok" else 0o755)
    done = subprocess.run(
        [sys.executable, "-m", "krex", "doctor", "--json"], capture_output=True, text=True
    )
    report = json.loads(done.stdout)
    assert by_id(report, "runtime-dir")["level"] == level
    assert report["ok"] == (status == 0)
    assert (done.returncode, done.stderr) == (status, "")


def test_text_shows_each_remedy_below_its_finding() -> None:
    text = doctor.as_text(
        [
            Finding("cpus", "ok", "2 of 2"),
            Finding("segment", "error", "bad\x1b[31m", "krex recover --purge"),
        ]
    )
    assert text.splitlines() == [
        "ok       cpus     2 of 2",
        "error    segment  bad\\x1b[31m",
        "                  mend it with: krex recover --purge",
        "1 error, no warnings",
    ]


# Reserved CPUs


def test_reserved_cpus_are_named_and_bad_settings_found() -> None:
    def finding(**environ: str) -> Finding:
        (found,) = run_check(doctor.check_reserved_cpus, **environ)
        return found

    cpus = sorted(os.sched_getaffinity(0))
    nothing = finding()
    assert (nothing.level, nothing.remedy) == ("ok", None)
    assert nothing.message.startswith("no CPUs would be kept")
    assert finding(KREX_RESERVED_CPUS="none").level == "ok"
    one = finding(KREX_RESERVED_CPUS=str(cpus[-1]))
    assert one.level == "ok"
    assert one.message.startswith(f"CPUs {cpus[-1]} would be kept")
    assert finding(KREX_RESERVED_CPUS=",".join(map(str, cpus))).level == "warning"
    for bad in ("x", "1-0", "1023"):
        found = finding(KREX_RESERVED_CPUS=bad)
        assert (found.level, found.remedy) == ("error", "unset KREX_RESERVED_CPUS")
        assert bad in found.message
    assert sorted(os.sched_getaffinity(0)) == cpus


def test_reserved_cpus_are_compared_with_those_of_commands_that_run(
    machine: harness.Machine,
) -> None:
    first, *_, last = sorted(os.sched_getaffinity(0))
    machine.actor(env={"KREX_RESERVED_CPUS": str(last)})
    environ = {"KREX_RUNTIME_DIR": str(machine.runtime_dir)}
    for same in ({}, {"KREX_RESERVED_CPUS": str(last)}):
        (found,) = run_check(doctor.check_reserved_cpus, **environ, **same)
        assert found.level == "ok"
        assert found.message == f"commands that run keep CPUs {last} for cpu"
    for other in (str(first), "none"):
        setting = {"KREX_RESERVED_CPUS": other}
        (found,) = run_check(doctor.check_reserved_cpus, **environ, **setting)
        assert (found.level, found.remedy) == ("warning", f"export KREX_RESERVED_CPUS={last}")
        assert machine.krex("run", "--", "true", env=setting).returncode == 2


@pytest.mark.parametrize("value", ["", "2", "0.5", "1e3", ".5", "5.", "+1", "1e-9"])
def test_limits_of_closed_time(machine: harness.Machine, value: str) -> None:
    (found,) = run_check(doctor.check_max_closed, KREX_MAX_CLOSED=value)
    assert (found.level, found.remedy) == ("ok", None)
    assert machine.krex("run", "--", "true", env={"KREX_MAX_CLOSED": value}).returncode == 0


@pytest.mark.parametrize(
    "value",
    ["abc", "0", "-1", "nan", "inf", "1_0", " 1", "1e-10", "1e20", "1" * 400, "\u0663", "."],
)
def test_limits_of_closed_time_that_are_none(machine: harness.Machine, value: str) -> None:
    (found,) = run_check(doctor.check_max_closed, KREX_MAX_CLOSED=value)
    assert (found.level, found.remedy) == ("error", "unset KREX_MAX_CLOSED")
    # The native program is of the same opinion.
    assert machine.krex("run", "--", "true", env={"KREX_MAX_CLOSED": value}).returncode == 2


# The kernel and /proc


def test_this_machine_has_what_krex_needs() -> None:
    assert [f.level for f in run_check(doctor.check_kernel)] == ["ok"]
    assert [f.level for f in run_check(doctor.check_proc)] == ["ok"]


def test_proc_of_another_pid_namespace_is_found_and_mended(runtime_dir: Path) -> None:
    before, after = remedied("", "proc", "--pid", "--fork")
    assert before["level"] == "error"
    assert "another PID namespace" in before["message"]
    assert after["level"] == "ok"


def test_without_proc_the_doctor_still_reports(runtime_dir: Path) -> None:
    before, after = remedied("mount -t tmpfs tmpfs /proc", "proc")
    assert before["level"] == "error"
    assert before["remedy"] == "mount -t proc proc /proc"
    assert after["level"] == "ok"
    (report,) = doctors(f"mount -t tmpfs tmpfs /proc; {DOCTOR} || true")
    assert {finding["id"] for finding in report["findings"]} == CHECKED
    assert any("could not be checked" in finding["message"] for finding in report["findings"])


# Freezers


def test_own_cgroup_has_this_process() -> None:
    assert str(os.getpid()) in (own_cgroup() / "cgroup.procs").read_text().split()


def test_cgroups_can_be_made_here() -> None:
    assert [f.level for f in run_check(doctor.check_cgroup_mount)] == ["ok"]
    assert [f.level for f in run_check(doctor.check_cgroup_rights)] == ["ok"]
    (finding,) = run_check(doctor.check_freezer)
    assert (finding.level, "cgroup2" in finding.message) == ("ok", True)


def test_a_read_only_cgroup_tree_is_found_and_mended(runtime_dir: Path) -> None:
    (mount, *_) = _cgroups.cgroup2_mounts(_procfs.mounts())
    point = shlex.quote(mount.mount_point)
    before, after = remedied(f"mount -o remount,ro,bind {point}", "cgroup.rights")
    assert before["level"] == "warning"
    assert "Read-only" in before["message"]
    assert after["level"] == "ok"


def test_a_missing_cgroup_tree_is_found_and_mended(runtime_dir: Path) -> None:
    points = [m.mount_point for m in _cgroups.cgroup2_mounts(_procfs.mounts())]
    setup = "; ".join(f"umount -l {shlex.quote(point)}" for point in points)
    before, after = remedied(setup, "cgroup.mount")
    assert before["level"] == "warning"
    assert "no cgroup v2 tree" in before["message"]
    assert after["level"] == "ok"
    (report,) = doctors(f"{setup}; {DOCTOR} || true")
    freezer = by_id(report, "freezer")
    assert (freezer["level"], "SIGSTOP" in freezer["message"]) == ("info", True)
    (report,) = doctors(f"{setup}; KREX_FREEZER=cgroup2 {DOCTOR} || true")
    freezer = by_id(report, "freezer")
    assert (freezer["level"], freezer["remedy"]) == ("error", "export KREX_FREEZER=auto")


def test_a_cgroup_of_another_user_is_found(runtime_dir: Path) -> None:
    rights = as_user(NOBODY, lambda: run_check(doctor.check_cgroup_rights))
    assert [finding.level for finding in rights] == ["warning"]
    assert "Permission denied" in rights[0].message
    # Never the root of all groups for one user.
    mount = own_cgroup().is_mount()
    expected = ("systemd-run --user --scope ",) if mount else ("sudo chown 65534 /", "systemd-run")
    assert (rights[0].remedy or expected[0]).startswith(expected)


def test_a_full_cgroup_is_found(runtime_dir: Path) -> None:
    group = own_cgroup() / f"doctor-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.max.descendants").write_text("0")
        program = (
            f"echo 0 > {group}/cgroup.procs; "
            f"{DOCTOR} > {runtime_dir}/report || true; echo 0 > {group.parent}/cgroup.procs"
        )
        subprocess.run(["sh", "-c", program], check=True, timeout=60)
        finding = by_id(json.loads((runtime_dir / "report").read_text()), "cgroup.rights")
        assert finding["level"] == "warning"
        assert finding["remedy"] == f"echo max > {group}/cgroup.max.descendants"
        subprocess.run(["sh", "-c", finding["remedy"]], check=True)
        _cgroups.try_child(str(group))
    finally:
        group.rmdir()


@pytest.mark.parametrize(
    ("value", "level", "remedy"),
    [
        ("sigstop", "ok", None),
        ("cgroup2", "ok", None),
        ("", "ok", None),
        ("v1", "error", "unset KREX_FREEZER"),
    ],
)
def test_the_freezer_that_the_environment_asks_for(
    value: str, level: str, remedy: str | None
) -> None:
    (finding,) = run_check(doctor.check_freezer, KREX_FREEZER=value)
    assert (finding.level, finding.remedy) == (level, remedy)


def test_a_group_left_frozen_is_found() -> None:
    prefix = _krex.group_prefix("/dev/shm/none")
    group = own_cgroup() / f"{prefix}-test {os.getpid()}"
    group.mkdir()
    try:
        findings = run_check(doctor.check_frozen_cgroups, KREX_RUNTIME_DIR="/dev/shm/other")
        (group / "cgroup.freeze").write_text("1")
        findings += run_check(doctor.check_frozen_cgroups, KREX_RUNTIME_DIR="/dev/shm/other")
        assert not any(str(group) in f.message for f in findings), "that is somebody else's"
        (group / "cgroup.freeze").write_text("0")
        findings = run_check(doctor.check_frozen_cgroups, KREX_RUNTIME_DIR="/dev/shm/none")
        assert not any(str(group) in f.message for f in findings)
        (group / "cgroup.freeze").write_text("1")
        findings = run_check(doctor.check_frozen_cgroups, KREX_RUNTIME_DIR="/dev/shm/none")
        (finding,) = [f for f in findings if str(group) in f.message]
        assert (finding.level, finding.remedy) == ("warning", "krex recover")
    finally:
        (group / "cgroup.freeze").write_text("0")
        group.rmdir()


# The runtime directory


def test_the_default_runtime_directory_is_the_users() -> None:
    for environ in ({}, {"KREX_RUNTIME_DIR": ""}):
        assert Machine(environ).runtime_dir == f"/dev/shm/krex-{os.geteuid()}"


def check_runtime_dir(path: Path | str) -> Finding:
    (finding,) = run_check(doctor.check_runtime_dir, KREX_RUNTIME_DIR=str(path))
    return finding


def test_a_good_runtime_directory(runtime_dir: Path) -> None:
    assert check_runtime_dir(runtime_dir).level == "ok"
    assert check_runtime_dir(runtime_dir / "not-yet").level == "ok"
    assert list(runtime_dir.iterdir()) == []


def test_a_runtime_directory_with_an_open_mode(runtime_dir: Path) -> None:
    runtime_dir.chmod(0o750)
    finding = check_runtime_dir(runtime_dir)
    assert (finding.level, "mode 0750" in finding.message) == ("error", True)
    assert finding.remedy is not None
    subprocess.run(["sh", "-c", finding.remedy], check=True)
    assert check_runtime_dir(runtime_dir).level == "ok"


def test_a_runtime_directory_without_parent(runtime_dir: Path) -> None:
    directory = runtime_dir / "a 'b'" / "c"
    finding = check_runtime_dir(directory)
    assert finding.level == "error"
    assert finding.remedy is not None
    subprocess.run(["sh", "-c", finding.remedy], check=True)
    assert check_runtime_dir(directory).level == "ok"


def test_a_runtime_directory_of_another_user(runtime_dir: Path) -> None:
    os.chown(runtime_dir, NOBODY, NOBODY)
    finding = check_runtime_dir(runtime_dir)
    assert (finding.level, "belongs to user 65534" in finding.message) == ("error", True)
    assert finding.remedy == f"export KREX_RUNTIME_DIR=/dev/shm/krex-{os.geteuid()}"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_runtime_directory_that_is_none(runtime_dir: Path, kind: str) -> None:
    path = runtime_dir / "krex-it"
    if kind == "file":
        path.touch()
    else:
        path.symlink_to(runtime_dir)
    finding = check_runtime_dir(path)
    assert (finding.level, finding.remedy) == ("error", f"rm {path}")
    somebodys = path.rename(runtime_dir / "it")
    finding = check_runtime_dir(somebodys)
    assert (finding.remedy or "").startswith("export KREX_RUNTIME_DIR=")


def test_a_relative_runtime_directory() -> None:
    finding, _ = run_check(doctor.check_runtime_dir, KREX_RUNTIME_DIR="here")
    assert (finding.level, finding.remedy) == (
        "error",
        f"export KREX_RUNTIME_DIR={shlex.quote(os.path.abspath('here'))}",
    )


def test_a_runtime_directory_that_cannot_be_made(runtime_dir: Path) -> None:
    (finding,) = as_user(NOBODY, lambda: [check_runtime_dir(runtime_dir.parent.parent / "krex")])
    assert (finding.level, "/dev is not writable" in finding.message) == ("error", True)
    assert finding.remedy == "sudo install -d -m 700 -o 65534 /dev/krex"


@pytest.mark.parametrize("options", ["ro", "size=64k"])
def test_a_runtime_directory_that_takes_no_data_is_found_and_mended(
    runtime_dir: Path, options: str
) -> None:
    mount = f"mount -t tmpfs -o mode=700,{options} tmpfs {runtime_dir}"
    before, after = remedied(mount, "runtime-dir")
    assert before["level"] == "error"
    assert ("not writable" if options == "ro" else "is full") in before["message"]
    assert after["level"] == "ok"


def test_a_runtime_directory_that_is_not_in_memory(runtime_dir: Path) -> None:
    (finding,) = run_check(doctor.check_runtime_filesystem, KREX_RUNTIME_DIR="/proc/krex/a")
    assert (finding.level, "is on proc" in finding.message) == ("warning", True)
    (finding,) = run_check(doctor.check_runtime_filesystem, KREX_RUNTIME_DIR=str(runtime_dir))
    assert finding.level == "ok"


# Other runtime directories


MAP = (
    "import mmap, sys\n"
    "file = open(sys.argv[1], 'r+b')\n"
    "memory = mmap.mmap(file.fileno(), 0)\n"
    "print('mapped', flush=True)\n"
    "sys.stdin.read()\n"
)


@contextmanager
def user_of(segment: Path, content: bytes, setup: Sequence[str] = ()) -> Iterator[int]:
    """A process that maps a segment with this content, which it makes itself."""
    path = shlex.quote(str(segment))
    script = [
        *setup,
        f"mkdir -p -m 700 {shlex.quote(str(segment.parent))}",
        f"{shlex.quote(sys.executable)} -c "
        f"'import sys; sys.stdout.buffer.write(bytes.fromhex(\"{content.hex()}\"))' > {path}",
        f"exec {shlex.quote(sys.executable)} -c {shlex.quote(MAP)} {path}",
    ]
    flags = ["unshare", "--mount"] if setup else []
    with subprocess.Popen(
        [*flags, "sh", "-ec", "\n".join(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"mapped\n"
            yield process.pid
        finally:
            process.stdin.close()
            process.wait(timeout=30)


SEGMENT = _segments.MAGIC.ljust(4096, b"\0")


def others(runtime_dir: Path, pid: int) -> list[Finding]:
    """The warnings that name a process, with this runtime directory for ours."""
    findings = run_check(doctor.check_other_runtime_dirs, KREX_RUNTIME_DIR=str(runtime_dir))
    return [f for f in findings if f.level == "warning" and f" {pid} " in f.message]


def test_a_user_of_another_directory_is_named(runtime_dir: Path) -> None:
    other = runtime_dir / "o ther"
    with user_of(other / "segment", SEGMENT) as pid:
        (finding,) = others(runtime_dir, pid)
    assert finding.message == (
        f"process {pid} uses {other} instead of {runtime_dir}, and is not excluded by regions here"
    )
    assert finding.remedy == f"export KREX_RUNTIME_DIR='{other}'"


def test_several_users_of_one_directory_are_one_finding(runtime_dir: Path) -> None:
    other = runtime_dir / "other"
    with (
        user_of(other / "segment", SEGMENT) as first,
        subprocess.Popen(
            [sys.executable, "-c", MAP, other / "segment"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as second,
    ):
        assert second.stdout is not None
        assert second.stdout.readline() == b"mapped\n"
        findings = run_check(doctor.check_other_runtime_dirs, KREX_RUNTIME_DIR=str(runtime_dir))
        second.communicate(b"")
    low, high = sorted((first, second.pid))
    assert [f for f in findings if f"processes {low}, {high} use {other} " in f.message]


def test_a_private_shm_is_another_directory(runtime_dir: Path) -> None:
    (runtime_dir / "segment").write_bytes(SEGMENT)
    setup = ["mount -t tmpfs tmpfs /dev/shm"]
    with user_of(runtime_dir / "segment", SEGMENT, setup) as pid:
        (finding,) = others(runtime_dir, pid)
    assert "another mount namespace" in finding.message
    assert finding.remedy is not None
    assert f"--volume {runtime_dir}:{runtime_dir}" in finding.remedy


def test_the_same_file_under_another_path_is_not_another_directory(runtime_dir: Path) -> None:
    (runtime_dir / "segment").write_bytes(SEGMENT)
    elsewhere = runtime_dir / "elsewhere"
    elsewhere.mkdir()
    setup = [f"mount --bind {runtime_dir} {elsewhere}"]
    with user_of(elsewhere / "segment", SEGMENT, setup) as pid:
        assert others(runtime_dir, pid) == []


def test_users_of_our_own_segment_are_not_named(runtime_dir: Path) -> None:
    with user_of(runtime_dir / "segment", SEGMENT) as pid:
        assert others(runtime_dir, pid) == []


def test_a_removed_segment_is_named(runtime_dir: Path) -> None:
    with user_of(runtime_dir / "segment", SEGMENT) as pid:
        (runtime_dir / "segment").unlink()
        (finding,) = others(runtime_dir, pid)
    assert "a segment that was removed" in finding.message


@pytest.mark.parametrize(
    "content",
    [b"something else".ljust(4096), b"short", _segments.MAGIC + b"\1" * 24],
    ids=["other magic", "short", "retired"],
)
def test_other_files_of_that_name_are_no_segments(runtime_dir: Path, content: bytes) -> None:
    with user_of(runtime_dir / "other" / "segment", content) as pid:
        assert others(runtime_dir, pid) == []


def test_the_supervisor_of_a_private_shm_is_named(runtime_dir: Path) -> None:
    program = shlex.quote(_native.native_program())
    script = (
        f"mount -t tmpfs tmpfs /dev/shm; mkdir -m 700 {runtime_dir}; "
        f"exec {program} run -- sh -c 'echo started; read _'"
    )
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-ec", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        findings = run_check(doctor.check_other_runtime_dirs, KREX_RUNTIME_DIR=str(runtime_dir))
        process.communicate(b"\n")
    assert [f for f in findings if f"{runtime_dir} of another mount namespace" in f.message]


# The segment


def test_a_segment_that_is_in_use_is_sound(runtime_dir: Path) -> None:
    program = [_native.native_program(), "run", "--", "sh", "-c", "echo started; read _"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        (finding,) = run_check(doctor.check_segment, KREX_RUNTIME_DIR=str(runtime_dir))
        magic = _procfs.first_bytes(str(runtime_dir / "segment"), len(_segments.MAGIC))
        process.communicate(b"\n")
    assert (finding.level, "the segment is sound" in finding.message) == ("ok", True)
    assert magic == _segments.MAGIC


def test_a_corrupted_segment_is_an_error_with_a_remedy(runtime_dir: Path) -> None:
    segment = runtime_dir / "segment"
    segment.write_bytes(b"something else".ljust(4096))
    segment.chmod(0o600)
    (finding,) = run_check(doctor.check_segment, KREX_RUNTIME_DIR=str(runtime_dir))
    assert finding.level == "error"
    assert str(runtime_dir) in finding.message
    assert finding.remedy is not None


def test_groups_frozen_for_a_region_are_not_left_over(runtime_dir: Path) -> None:
    program = [_native.native_program(), "run", "--", "sh", "-c", "echo started; exec sleep 60"]
    holding = (
        "import krex.region, sys\n"
        "with krex.region.critical():\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(program, stdout=subprocess.PIPE) as sibling:
        try:
            assert sibling.stdout is not None
            assert sibling.stdout.readline() == b"started\n"
            with subprocess.Popen(
                [sys.executable, "-c", holding], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as holder:
                assert holder.stdout is not None
                assert holder.stdout.readline() == b"held\n"
                (finding,) = run_check(
                    doctor.check_frozen_cgroups, KREX_RUNTIME_DIR=str(runtime_dir)
                )
                holder.communicate(b"")
        finally:
            sibling.kill()
    assert (finding.level, "for a region" in finding.message) == ("info", True)


# The native program


def installed_copy(directory: Path) -> dict[str, str]:
    """Copy the package as `pip install --target` lays it out; return an environment for it."""
    shutil.copytree(PACKAGE, directory / "krex", ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "bin").mkdir()
    return {**os.environ, "PYTHONPATH": str(directory)}


def find_native(environ: dict[str, str]) -> str:
    code = "from krex._native import native_program; print(native_program())"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_native_program_beside_the_package_is_found(tmp_path: Path) -> None:
    environ = installed_copy(tmp_path)
    shutil.copy("/bin/true", tmp_path / "bin" / "krex")
    assert find_native(environ) == str(tmp_path / "bin" / "krex")


def test_a_script_of_that_name_is_passed_over(tmp_path: Path) -> None:
    environ = installed_copy(tmp_path)
    script = tmp_path / "bin" / "krex"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    assert find_native(environ) == _native.native_program()
