"""``krex doctor``: what this machine lets krex do, and the command that mends what is wrong."""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from krex import _cgroups, _native, _procfs, _segments
from krex._findings import Finding, Level, Machine, reason, some
from krex._runtime_dir import check_runtime_dir, check_runtime_filesystem
from krex._text import one_line

_SYS_FUTEX_WAITV = 449

Check = Callable[[Machine], Iterable[Finding]]


def examine(environ: Mapping[str, str] | None = None) -> list[Finding]:
    """Run all checks and return their findings, in the order in which a person should read them.

    A check that fails itself becomes a finding; nothing is raised. Nothing is changed either:
    what is made for trying is removed again.
    """
    machine = Machine() if environ is None else Machine(environ)
    findings: list[Finding] = []
    for identifier, check in CHECKS:
        findings.extend(_guarded(identifier, check, machine))
    return findings


def _guarded(identifier: str, check: Check, machine: Machine) -> list[Finding]:
    try:
        return list(check(machine))
    except Exception as error:
        cause = one_line(f"{type(error).__name__}: {error}")
        return [Finding(identifier, "warning", f"this could not be checked ({cause})")]


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Return whether no finding is an error."""
    return all(finding.level != "error" for finding in findings)


# The kernel


def check_kernel(machine: Machine) -> Iterator[Finding]:
    """The kernel's version, and the system calls that krex needs or likes."""
    release = os.uname().release
    missing = _missing_pidfd_call()
    if missing is None:
        yield Finding("kernel", "ok", f"Linux {release} has pidfd_open and pidfd_send_signal")
    else:
        yield Finding(
            "kernel",
            "error",
            f"Linux {release} does not let this process use {missing}; "
            "krex needs Linux 5.4 or newer and a seccomp filter that allows it",
        )


def _missing_pidfd_call() -> str | None:
    import signal

    call = "pidfd_open"
    try:
        descriptor = os.pidfd_open(os.getpid())
        try:
            call = "pidfd_send_signal"
            signal.pidfd_send_signal(descriptor, 0)
        finally:
            os.close(descriptor)
    except (AttributeError, OSError) as error:
        return f"{call} ({error})"
    return None


def check_futex_waitv(machine: Machine) -> Iterator[Finding]:
    """Whether one thread can wait on several futexes (optional)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(ctypes.c_long(_SYS_FUTEX_WAITV), None, 0, 0, None, 0)
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        yield Finding("kernel.futex_waitv", "ok", "the kernel has futex_waitv")
    else:
        yield Finding(
            "kernel.futex_waitv",
            "info",
            f"there is no futex_waitv ({os.strerror(code)}), which krex can do without",
        )


def check_proc(machine: Machine) -> Iterator[Finding]:
    """Whether /proc belongs to this process's own PID namespace."""
    remedy = "mount -t proc proc /proc"
    try:
        with open("/proc/self/stat", "rb") as file:
            shown = int(file.read().split(b" ", 1)[0])
    except OSError as error:
        yield Finding(
            "proc", "error", f"/proc does not show this process ({error.strerror})", remedy
        )
        return
    if shown == os.getpid():
        yield Finding("proc", "ok", "/proc is that of this PID namespace")
    else:
        yield Finding(
            "proc",
            "error",
            f"/proc is that of another PID namespace (this is process {os.getpid()}, "
            f"/proc calls it {shown})",
            remedy,
        )


# Freezers


def check_cgroup_mount(machine: Machine) -> Iterator[Finding]:
    """Whether a cgroup v2 tree is mounted and shows the caller's own group."""
    if not _cgroups.cgroup2_mounts(machine.mounts):
        yield Finding(
            "cgroup.mount", "warning", "no cgroup v2 tree is mounted", _mount_cgroup2(machine)
        )
        return
    try:
        directory = _cgroups.own_directory(machine.mounts)
    except _cgroups.NoCgroupError as error:
        yield Finding("cgroup.mount", "warning", str(error))
    else:
        yield Finding("cgroup.mount", "ok", f"this process's cgroup v2 group is {directory}")


def _mount_cgroup2(machine: Machine) -> str:
    base = "/sys/fs/cgroup"
    if any(mount.mount_point == base for mount in machine.mounts):
        unified = f"{base}/unified"
        return f"mkdir -p {unified} && mount -t cgroup2 cgroup2 {unified}"
    return f"mount -t cgroup2 cgroup2 {base}"


def check_cgroup_rights(machine: Machine) -> Iterator[Finding]:
    """Whether a freezable group can be made below the caller's own; tried, and undone."""
    error = machine.cgroup_error
    if error is None:
        yield Finding(
            "cgroup.rights", "ok", "groups can be made and frozen below this process's own"
        )
    elif isinstance(error, OSError):
        yield Finding(
            "cgroup.rights",
            "warning",
            f"no freezable group can be made below this process's own ({reason(error)})",
            _grant_cgroup(machine, error),
        )


def _grant_cgroup(machine: Machine, error: OSError) -> str | None:
    directory = _cgroups.own_directory(machine.mounts)
    if error.errno == errno.EROFS:
        return f"mount -o remount,rw,bind {shlex.quote(_mount_point_of(machine, directory))}"
    if error.errno == errno.EAGAIN:
        return f"echo max > {shlex.quote(os.path.join(directory, 'cgroup.max.descendants'))}"
    if error.errno not in (errno.EACCES, errno.EPERM) or os.geteuid() == 0:
        return None
    if os.path.isdir("/run/systemd/system"):
        return 'systemd-run --user --scope --property=Delegate=yes "$SHELL"'
    if os.path.ismount(directory):
        return None  # Nobody should own the root of all groups.
    members = shlex.quote(os.path.join(directory, "cgroup.procs"))
    return f"sudo chown {os.geteuid()} {shlex.quote(directory)} {members}"


def _mount_point_of(machine: Machine, path: str) -> str:
    points = [m.mount_point for m in _cgroups.cgroup2_mounts(machine.mounts)]
    return max((p for p in points if _procfs.is_within(path, p)), key=len, default=path)


def check_freezer(machine: Machine) -> Iterator[Finding]:
    """Which freezer krex takes, given KREX_FREEZER."""
    wanted = machine.environ.get("KREX_FREEZER") or "auto"
    usable = machine.cgroup_error is None
    if wanted not in ("auto", "cgroup2", "sigstop"):
        yield Finding(
            "freezer",
            "error",
            f"KREX_FREEZER is {wanted!r}, which is none of auto, cgroup2 and sigstop",
            "unset KREX_FREEZER",
        )
    elif wanted == "cgroup2" and not usable:
        yield Finding(
            "freezer",
            "error",
            "KREX_FREEZER asks for cgroup2, which cannot be used here (see the cgroup findings)",
            "export KREX_FREEZER=auto",
        )
    elif wanted == "sigstop":
        yield Finding("freezer", "ok", "commands are frozen by SIGSTOP, as KREX_FREEZER says")
    elif usable:
        yield Finding("freezer", "ok", "commands are frozen by their cgroup (cgroup2)")
    else:
        yield Finding(
            "freezer",
            "info",
            "commands are frozen by SIGSTOP, which their parents can see, "
            "since cgroup2 cannot be used here",
        )


# The segment and others on the machine


def check_segment(machine: Machine) -> Iterator[Finding]:
    """The extension, and what the segment's header says through it."""
    from krex.errors import KrexError

    try:
        from krex import _krex
    except ImportError as error:
        yield Finding(
            "segment",
            "error",
            f"the extension krex._krex cannot be loaded ({one_line(str(error))})",
            _native.reinstall_command(),
        )
        return
    if not os.path.lexists(machine.segment):
        yield Finding("segment", "ok", "there is no segment yet, so nothing is running")
        return
    try:
        snapshot = _krex.snapshot(machine.runtime_dir)
    except KrexError as error:
        remedy = getattr(error, "remedy", None) or "krex recover --purge"
        yield Finding("segment", "error", one_line(str(error)), remedy)
        return
    yield from _snapshot_findings(snapshot)


def _snapshot_findings(snapshot: Mapping[str, Any]) -> Iterator[Finding]:
    # One that has gone because nobody needed it any more is as it should be.
    dead = [it["pid"] for it in snapshot["supervisors"] if not it["alive"] and it["tenants"]]
    if dead:
        yield Finding(
            "segment",
            "warning",
            f"supervisors died while they had tenants ({some(dead)})",
            "krex recover",
        )
    else:
        yield Finding(
            "segment",
            "ok",
            f"the segment is sound (layout {snapshot['layout']}, krex {snapshot['version']}, "
            f"{len(snapshot['tenants'])} tenants)",
        )


def check_other_runtime_dirs(machine: Machine) -> Iterator[Finding]:
    """Whether processes on this machine use another segment: krex excludes none of them."""
    others, hidden = _segments.elsewhere(machine.segment)
    for other in others:
        yield _not_excluded(machine, other)
    if not others:
        yield Finding(
            "other-runtime-dirs", "ok", "no process that can be seen uses another runtime directory"
        )
    if hidden:
        yield Finding(
            "other-runtime-dirs",
            "info",
            f"this user has no right to look at {_count(hidden, 'process', 'processes')}",
            "sudo krex doctor" if os.geteuid() != 0 else None,
        )


def _not_excluded(machine: Machine, other: _segments.Elsewhere) -> Finding:
    ours = shlex.quote(machine.runtime_dir)
    where = other.directory
    foreign_users = sorted(other.users() - {os.geteuid()})
    remedy = None
    if other.removed:
        what = f"a segment that was removed from {where}"
    elif foreign_users:
        what = f"{where}, as user {some(foreign_users)}"
    elif other.is_in_another_mount_namespace():
        what = f"{where} of another mount namespace (a private /dev/shm, for example)"
        remedy = f"docker run --env KREX_RUNTIME_DIR={ours} --volume {ours}:{ours} ..."
    else:
        what = f"{where} instead of {machine.runtime_dir}"
        remedy = f"export KREX_RUNTIME_DIR={shlex.quote(where)}"
    one = len(other.pids) == 1
    subject, verbs = ("process", ("uses", "is")) if one else ("processes", ("use", "are"))
    return Finding(
        "other-runtime-dirs",
        "warning",
        f"{subject} {some(other.pids)} {verbs[0]} {what}, "
        f"and {verbs[1]} not excluded by regions here",
        remedy,
    )


def check_frozen_cgroups(machine: Machine) -> Iterator[Finding]:
    """Whether a cgroup of krex's is frozen although no region is running."""
    try:
        directory = _cgroups.own_directory(machine.mounts)
    except _cgroups.NoCgroupError:
        return
    frozen = _cgroups.frozen_tenants(directory, machine.runtime_dir)
    if not frozen:
        yield Finding("frozen-cgroups", "ok", f"nothing of krex's is frozen below {directory}")
    elif _region_is_running(machine):
        yield Finding("frozen-cgroups", "info", f"{len(frozen)} groups are frozen for a region")
    else:
        yield Finding(
            "frozen-cgroups",
            "warning",
            f"left frozen although no region is running: {one_line(some(frozen))}",
            "krex recover",
        )


def _region_is_running(machine: Machine) -> bool:
    return any(device["holder"] is not None for device in _devices(machine))


def _devices(machine: Machine) -> list[dict[str, Any]]:
    """Return the segment's devices; none if there is no segment that can be read."""
    if not os.path.lexists(machine.segment):
        return []
    try:
        from krex import _krex

        devices: list[dict[str, Any]] = _krex.snapshot(machine.runtime_dir)["devices"]
    except (ImportError, OSError, RuntimeError):
        return []
    return devices


def check_cpus(machine: Machine) -> Iterator[Finding]:
    """How many CPUs this process may use, and how loaded they are."""
    allowed = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    busy = ", more than one runnable thread for each" if load > (os.cpu_count() or 1) else ""
    level: Level = "info" if busy or allowed == 1 else "ok"
    yield Finding(
        "cpus",
        level,
        f"{allowed} of {os.cpu_count()} CPUs may be used; the load is {load:.1f}{busy}",
    )


def check_reserved_cpus(machine: Machine) -> Iterator[Finding]:
    """Which CPUs are kept for regions, or would be by the first command, and why."""
    try:
        from krex import _krex
    except ImportError:
        return  # The segment's finding says so.
    setting = machine.environ.get("KREX_RESERVED_CPUS")
    try:
        cpus, why, leaves_none = _krex.planned_reservation("cpu", setting)
    except (OSError, ValueError) as error:
        yield Finding("reserved-cpus", "error", one_line(str(error)), "unset KREX_RESERVED_CPUS")
        return
    for device, kept in _kept_cpus(machine):
        if setting is not None and kept != cpus:
            yield Finding(
                "reserved-cpus",
                "warning",
                f"KREX_RESERVED_CPUS is {setting!r}, but commands that run keep CPUs {kept} for "
                f"{device}, and no other setting is let in before they have ended",
                f"export KREX_RESERVED_CPUS={shlex.quote(kept)}",
            )
        else:
            yield Finding("reserved-cpus", "ok", f"commands that run keep CPUs {kept} for {device}")
        if device == "cpu":
            return
    if not cpus:
        yield Finding("reserved-cpus", "ok", f"no CPUs would be kept for regions on cpu ({why})")
    elif leaves_none:
        yield Finding(
            "reserved-cpus",
            "warning",
            f"all CPUs ({cpus}) would be kept for regions, so nobody could be kept off them",
            "unset KREX_RESERVED_CPUS",
        )
    else:
        yield Finding(
            "reserved-cpus", "ok", f"CPUs {cpus} would be kept for regions on cpu ({why})"
        )


def _kept_cpus(machine: Machine) -> list[tuple[str, str]]:
    """Return the devices for which commands that run keep CPUs, and which; `cpu` is the last."""
    found = [(it["name"], it["cpus"]) for it in _devices(machine) if it["cpus"]]
    return sorted(found, key=lambda it: (it[0] == "cpu", it[0]))


#: As rust/krex-core/src/budget.rs reads numbers.
_SECONDS = re.compile(r"\+?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def check_max_closed(machine: Machine) -> Iterator[Finding]:
    """How long regions may follow one another, given KREX_MAX_CLOSED."""
    value = machine.environ.get("KREX_MAX_CLOSED") or "2"
    # Durations are whole nanoseconds, and their seconds have 64 bits.
    if _SECONDS.fullmatch(value) and 0.5e-9 < float(value) < 2**64:
        yield Finding(
            "max-closed",
            "ok",
            f"regions that follow one another keep others out for {float(value):g} s in a row",
        )
    else:
        yield Finding(
            "max-closed",
            "error",
            f"KREX_MAX_CLOSED is {value!r}, which is no positive number of seconds",
            "unset KREX_MAX_CLOSED",
        )


def check_bench_directories(machine: Machine) -> Iterator[Finding]:
    """Whether benches that were killed have left directories behind."""
    from krex.bench.directories import abandoned

    left = [str(it) for it in abandoned()]
    if left:
        yield Finding(
            "bench-directories",
            "warning",
            f"left behind by `krex bench`, which was killed: {one_line(some(left))}",
            f"rm -r {' '.join(shlex.quote(it) for it in left)}",
        )
    else:
        yield Finding("bench-directories", "ok", "no bench that was killed has left anything")


def check_native_program(machine: Machine) -> Iterator[Finding]:
    """Whether the native program that launches commands is installed."""
    try:
        path = _native.native_program()
    except _native.NativeProgramError:
        yield Finding(
            "native-program",
            "error",
            "the native program krex is not installed beside this package",
            _native.reinstall_command(),
        )
    else:
        yield Finding("native-program", "ok", f"the native program is {path}")


#: All checks, with the id under which a check reports that it failed itself.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("kernel", check_kernel),
    ("kernel.futex_waitv", check_futex_waitv),
    ("proc", check_proc),
    ("cgroup.mount", check_cgroup_mount),
    ("cgroup.rights", check_cgroup_rights),
    ("freezer", check_freezer),
    ("runtime-dir", check_runtime_dir),
    ("runtime-dir.filesystem", check_runtime_filesystem),
    ("segment", check_segment),
    ("other-runtime-dirs", check_other_runtime_dirs),
    ("frozen-cgroups", check_frozen_cgroups),
    ("cpus", check_cpus),
    ("reserved-cpus", check_reserved_cpus),
    ("max-closed", check_max_closed),
    ("bench-directories", check_bench_directories),
    ("native-program", check_native_program),
)


# Output


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON: ``{"ok": bool, "findings": [{id, level, message, remedy}]}``."""
    import json

    report = {"ok": is_healthy(findings), "findings": [asdict(finding) for finding in findings]}
    return json.dumps(report, indent=2)


def as_text(findings: Sequence[Finding]) -> str:
    """Return the findings as text, each remedy below its finding."""
    column = max((len(finding.id) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:7}  {finding.id:{column}}  {one_line(finding.message)}")
        if finding.remedy is not None:
            lines.append(f"{'':7}  {'':{column}}  mend it with: {one_line(finding.remedy)}")
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    lines.append(f"{_count(errors, 'error', 'errors')}, {_count(warnings, 'warning', 'warnings')}")
    return "\n".join(lines)


def _count(number: int, one: str, many: str) -> str:
    return f"{number or 'no'} {one if number == 1 else many}"


def show(*, as_json_text: bool) -> int:
    """Print the findings on standard output; return 1 if one of them is an error, else 0."""
    findings = examine()
    print(as_json(findings) if as_json_text else as_text(findings))
    return 0 if is_healthy(findings) else 1
