"""The interposer: what a process submits to the CUDA driver waits at the gate and is drained."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simgpu
from harness import LIMIT, Actor, Machine, wait_until

TABLE = Path(__file__).parents[1] / "rust" / "krex-driver" / "cuda.table"


@pytest.fixture
def gpu() -> Iterator[simgpu.SimGpu]:
    with simgpu.device() as device:
        yield device


def tell(actor: Actor, function: str, limit: float = LIMIT, **arguments: Any) -> Any:
    """Have an actor call a function of cuda_client.py."""
    actor.send("call", module="cuda_client", function=function, arguments=arguments)
    return actor.answer(limit)


def start(machine: Machine, gpu: simgpu.SimGpu, **arguments: Any) -> tuple[Actor, str]:
    """An actor with a context, and krex's name for its device."""
    actor = machine.actor(env=gpu.environment)
    return actor, tell(actor, "begin", **arguments)


def last_idle(gpu: simgpu.SimGpu, actor: Actor) -> int:
    """When the device had last done all that an actor had submitted."""
    return max(it.time for it in gpu.journal(actor.pid) if it.kind == "idle")


def wrapped(*classes: str) -> dict[str, int]:
    """The functions of these classes of the table, with how many parameters each has."""
    functions: dict[str, int] = {}
    current = ""
    for line in TABLE.read_text().splitlines():
        if title := re.fullmatch(r"\[(.*)\]", line):
            current = title[1]
        elif match := re.fullmatch(r"\d+ (\w+)(?:\((.*)\)| = (\w+))", line):
            name, parameters, twin = match.groups()
            count = functions.get(twin, 0) if twin else parameters.count(",") + 1
            if current.split(":")[0] in classes:
                functions[name] = count
    return functions


def exported() -> set[str]:
    """The names that the driver for tests has."""
    done = subprocess.run(
        ["nm", "-D", "--defined-only", simgpu.LIBRARY], check=True, text=True, capture_output=True
    )
    return {line.split()[-1] for line in done.stdout.splitlines()}


def held_by_child(actor: Actor, device: str, place: Path) -> tuple[Path, Path]:
    """Have a child of the actor hold a region: an ancestor is gated, but never frozen."""
    held, go = place / "held", place / "go"
    tell(actor, "start_child", device=device, held=str(held), go=str(go))
    wait_until(held.exists, "the child is in its region")
    return held, go


GATED = (
    "submission",
    "submission config",
    "submission list",
    "resource",
    "resource upload",
    "resource stream_end",
    "birth of_device",
    "birth",
    "death of_context",
    "death",
    "capture begin",
)


def test_every_entry_waits_at_the_gate(
    machine: Machine, gpu: simgpu.SimGpu, tmp_path: Path
) -> None:
    actor, device = start(machine, gpu)
    tell(actor, "synchronize")
    names = {it: count for it, count in wrapped(*GATED).items() if it in exported()}
    assert len(names) > 120
    held, go = held_by_child(actor, device, tmp_path)
    done = tmp_path / "done"
    actor.send(
        "call",
        module="cuda_client",
        function="call_all",
        arguments={"names": list(names.items()), "done": str(done)},
    )
    wait_until(Path(f"{done}.started").exists, "all threads run")
    time.sleep(0.3)
    assert not done.exists()
    reached = {it.name for it in gpu.journal(actor.pid)}
    opened = time.monotonic_ns()
    go.touch()
    actor.answer()
    lines = [line.split() for line in done.read_text().splitlines()]
    early = [line[0] for line in lines if int(line[2]) < opened]
    assert early == []
    assert {line[0] for line in lines} == set(names)
    # Each came back with the driver's own answer: most of them refuse zeros.
    assert len({line[3] for line in lines}) > 1
    assert {it.name for it in gpu.journal(actor.pid)} >= reached
    report = json.loads(wait_until(lambda: held.read_text(), "the report"))
    assert [it["submissions"] for it in report["siblings"]] == [0]
    assert tell(actor, "wait_for_child") == 0


def test_streams_are_drained_before_the_region(machine: Machine, gpu: simgpu.SimGpu) -> None:
    sibling, device = start(machine, gpu)
    holder = machine.actor("--device", device, env=gpu.environment)
    for stream in (0, 1, None):
        tell(sibling, "launch", seconds=0.3, stream=stream)
    holder.do("enter", drain_timeout=10)
    entered = time.monotonic_ns()
    report = holder.do("leave")
    assert last_idle(gpu, sibling) < entered
    assert [it["drained"] for it in report["siblings"]] == ["streams"]
    assert report["verdict"] == "clean", report["reasons"]
    assert report["drain_s"] > 0.1


def test_who_submitted_nothing_is_not_asked(machine: Machine, gpu: simgpu.SimGpu) -> None:
    sibling, device = start(machine, gpu)
    holder = machine.actor("--device", device)
    tell(sibling, "launch", seconds=0.01)
    assert holder.do("whole", device=device)["siblings"][0]["drained"] == "streams"
    assert holder.do("whole", device=device)["siblings"][0]["drained"] == "idle"
    tell(sibling, "launch")
    assert holder.do("whole", device=device)["siblings"][0]["drained"] == "streams"


def test_an_endless_kernel_is_waited_for_once(machine: Machine, gpu: simgpu.SimGpu) -> None:
    sibling, device = start(machine, gpu)
    tell(sibling, "launch", name="forever", stream=0)
    holder = machine.actor("--device", device)
    report = holder.do("whole", drain_timeout=0.3)
    assert report["siblings"][0]["drained"] == "timed out"
    assert report["verdict"] == "contended"
    assert any("work of it was still running" in it for it in report["reasons"])
    assert report["drain_s"] >= 0.3
    report = holder.do("whole", drain_timeout=30)
    assert report["verdict"] == "contended"
    assert report["drain_s"] < 10


def test_an_error_counts_as_drained_and_is_told(machine: Machine, gpu: simgpu.SimGpu) -> None:
    sibling, device = start(machine, gpu)
    tell(sibling, "launch", name="crash", stream=0)
    holder = machine.actor("--device", device)
    report = holder.do("whole", drain_timeout=10)
    assert report["siblings"][0]["drained"] == "error"
    assert report["verdict"] == "clean", report["reasons"]


def test_the_regions_own_work_belongs_to_it(machine: Machine, gpu: simgpu.SimGpu) -> None:
    holder, device = start(machine, gpu)
    sibling, _ = start(machine, gpu)
    # The device is that of its only context.
    holder.do("enter")
    tell(holder, "launch", seconds=0.3, stream=0)
    tell(holder, "launch", seconds=0.3, stream=1)
    sibling.send("call", module="cuda_client", function="launch", arguments={})
    report = holder.do("leave")
    sibling.answer()
    assert report["device"] == device
    assert report["pending_at_exit_s"] > 0.1
    assert (report["submissions"], report["streams"]) == (2, 2)
    # The stall breaker saw that the holder was waiting for the device.
    assert report["verdict"] == "clean", report["reasons"]
    idle = [it.time for it in gpu.journal(holder.pid) if it.kind == "idle"]
    launched = [it.time for it in gpu.journal(sibling.pid) if it.kind == "launch"]
    assert idle[0] < launched[0]


def test_a_first_context_within_a_region(machine: Machine, gpu: simgpu.SimGpu) -> None:
    first = machine.actor(env=gpu.environment)
    device = tell(first, "begin")
    holder = machine.actor("--device", device, env=gpu.environment)
    holder.do("enter")
    assert tell(holder, "begin") == device
    tell(holder, "launch", seconds=0.1, stream=0)
    report = holder.do("leave")
    assert report["verdict"] == "clean", report["reasons"]
    assert report["submissions"] > 0
    assert report["pending_at_exit_s"] > 0


def test_a_child_of_the_holder_submits_in_its_region(machine: Machine, gpu: simgpu.SimGpu) -> None:
    holder, _ = start(machine, gpu)
    holder.do("enter")
    code = "import cuda_client as c; c.begin(); c.launch(seconds=0.2); print('ok')"
    directory = os.path.dirname(__file__)
    program = f"import sys; sys.path.insert(0, {directory!r}); {code}"
    assert tell(holder, "exec_python", code=program) == "ok\n"
    report = holder.do("leave")
    assert report["verdict"] == "clean", report["reasons"]


def test_a_process_splits_off_before_or_after_its_context(
    machine: Machine, gpu: simgpu.SimGpu
) -> None:
    """The interposer and the module are clients of their own, of one tenant."""
    actor = machine.actor(env=gpu.environment)
    directory = os.path.dirname(__file__)
    for lines in (
        ("with r.critical(): pass", "c.begin()"),
        ("c.begin()", "with r.critical(): pass"),
    ):
        program = (
            "import sys",
            f"sys.path.insert(0, {directory!r})",
            "import cuda_client as c, krex.region as r",
            *lines,
            "with r.critical() as region: c.launch(seconds=0.05)",
            "report = region.report",
            "print(report.device[:4], report.submissions, report.verdict)",
        )
        # Once there is a context, regions are about its device.
        assert tell(actor, "exec_python", code="\n".join(program)) == "GPU- 1 clean\n"
        wait_until(lambda: list(machine.tenants()) == [actor.pid], "its tenant is gone")


def test_nothing_pending_costs_nothing(machine: Machine, gpu: simgpu.SimGpu) -> None:
    holder, _ = start(machine, gpu)
    assert holder.do("whole")["pending_at_exit_s"] >= 0
    report = holder.do("whole")
    assert (report["pending_at_exit_s"], report["submissions"], report["streams"]) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("flags", [0, 1], ids=["blocking", "non-blocking"])
def test_captures_survive_a_drain(
    machine: Machine, gpu: simgpu.SimGpu, mode: str, flags: int
) -> None:
    sibling, device = start(machine, gpu, flags=flags)
    holder = machine.actor("--device", device)
    # Work on the stream itself before its capture, and on another one.
    tell(sibling, "launch", seconds=0.2, stream=0)
    tell(sibling, "launch", seconds=0.2, stream=1)
    tell(sibling, "begin_capture", mode=mode)
    holder.do("enter", drain_timeout=10)
    entered = time.monotonic_ns()
    report = holder.do("leave")
    assert last_idle(gpu, sibling) < entered
    assert report["siblings"][0]["drained"] == "streams"
    assert report["verdict"] == "clean", report["reasons"]
    assert tell(sibling, "end_capture") == 2


def test_random_programs_never_meet(machine: Machine, gpu: simgpu.SimGpu) -> None:
    """While one is in its region, nothing of any other reaches the device, or still runs on it."""
    actors = [start(machine, gpu)[0] for _ in range(3)]
    regions = int(os.environ.get("KREX_TEST_SCHEDULES", "300")) // 10
    for seed, actor in enumerate(actors):
        arguments = {"seed": seed, "regions": regions}
        actor.send("call", module="cuda_client", function="work_at_random", arguments=arguments)
    held = {actor.pid: actor.answer(limit=1000) for actor in actors}
    journal = gpu.journal()
    for pid, mine in held.items():
        for region in mine:
            assert region["verdict"] == "clean", region["why"]
            inside = range(region["entered"], region["left"])
            met = [it for it in journal if it.pid != pid and it.time in inside]
            submitted = [it for it in met if it.kind in simgpu.SUBMISSIONS]
            assert submitted == []
            # The last of one before that is what it was doing then.
            for other in held.keys() - {pid}:
                before = [it.kind for it in journal if it.pid == other and it.time < inside.start]
                states = [it for it in before if it in ("busy", "idle")]
                assert states[-1:] != ["busy"]


def test_default_streams_of_threads_are_drained(machine: Machine, gpu: simgpu.SimGpu) -> None:
    environment = {"CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": "1", **gpu.environment}
    sibling = machine.actor(env=environment)
    device = tell(sibling, "begin")
    holder = machine.actor("--device", device)
    tell(sibling, "launch", seconds=0.3)
    assert {it.name for it in gpu.submissions(sibling.pid)} >= {"cuLaunchKernel_ptsz"}
    holder.do("enter", drain_timeout=10)
    entered = time.monotonic_ns()
    assert holder.do("leave")["siblings"][0]["drained"] == "streams"
    assert last_idle(gpu, sibling) < entered


def test_more_streams_than_are_known_are_drained(machine: Machine, gpu: simgpu.SimGpu) -> None:
    sibling, device = start(machine, gpu)
    holder = machine.actor("--device", device)
    tell(sibling, "launch_on_many", count=4200, seconds=0.3)
    holder.do("enter", drain_timeout=30)
    entered = time.monotonic_ns()
    assert holder.do("leave")["siblings"][0]["drained"] == "streams"
    assert last_idle(gpu, sibling) < entered


def test_a_context_that_is_reset(machine: Machine, gpu: simgpu.SimGpu) -> None:
    sibling, device = start(machine, gpu)
    holder = machine.actor("--device", device)
    for _ in range(3):
        tell(sibling, "reset")
        tell(sibling, "launch", seconds=0.05, stream=0)
        report = holder.do("whole", drain_timeout=10)
        assert report["siblings"][0]["drained"] == "streams"
        assert report["verdict"] == "clean", report["reasons"]


def test_each_device_has_a_gate_of_its_own(machine: Machine) -> None:
    with simgpu.device(devices=2) as gpu:
        first = machine.actor(env=gpu.environment)
        second = machine.actor(env=gpu.environment)
        hidden = machine.actor(env={"CUDA_VISIBLE_DEVICES": "1", **gpu.environment})
        names = [tell(it, "begin", ordinal=at) for it, at in ((first, 0), (second, 1), (hidden, 0))]
        assert names[0] != names[1] == names[2]
        assert {it["name"] for it in machine.status()["devices"]} >= set(names)
        first.do("hold")
        # Neither frozen nor turned back.
        tell(second, "set_memory", count=3)
        assert second.do("whole")["device"] == names[1]
        assert [it["name"] for it in first.do("leave")["siblings"]] == []


@pytest.mark.parametrize("capture", [False, True], ids=["", "capturing"])
@pytest.mark.parametrize("with_current", [True, False], ids=["current", "no context"])
def test_a_context_that_has_ended_is_no_error(
    machine: Machine, gpu: simgpu.SimGpu, with_current: bool, capture: bool
) -> None:
    """Nor does it leave anything behind that is waited for: streams, destroyed ones, captures."""
    sibling, device = start(machine, gpu)
    holder = machine.actor("--device", device)
    for _ in range(2):
        tell(sibling, "second_context", capture=capture)
        tell(sibling, "end_second_context", with_current=with_current)
        tell(sibling, "launch", seconds=0.1, stream=0)
        tell(sibling, "launch", seconds=0.1)
        holder.do("enter", drain_timeout=10)
        entered = time.monotonic_ns()
        report = holder.do("leave")
        assert last_idle(gpu, sibling) < entered
        assert report["siblings"][0]["drained"] == "streams"
        assert report["verdict"] == "clean", report["reasons"]


def test_a_context_that_ends_after_a_drain(machine: Machine, gpu: simgpu.SimGpu) -> None:
    """That has made an event in it."""
    sibling, device = start(machine, gpu)
    holder = machine.actor("--device", device)
    for _ in range(2):
        tell(sibling, "second_context")
        assert holder.do("whole", drain_timeout=10)["siblings"][0]["drained"] == "streams"
        tell(sibling, "launch", seconds=0.1, stream=0)
        tell(sibling, "end_second_context")
        assert holder.do("whole", drain_timeout=10)["siblings"][0]["drained"] == "streams"


def test_a_stream_used_from_another_context_is_drained(
    machine: Machine, gpu: simgpu.SimGpu
) -> None:
    sibling, device = start(machine, gpu)
    holder = machine.actor("--device", device)
    tell(sibling, "launch", seconds=0.5, stream=0)
    tell(sibling, "record_from_second_context", stream=0)
    holder.do("enter", drain_timeout=10)
    entered = time.monotonic_ns()
    assert holder.do("leave")["siblings"][0]["drained"] == "streams"
    assert last_idle(gpu, sibling) < entered


def test_captures_may_begin_beside_each_other(machine: Machine, gpu: simgpu.SimGpu) -> None:
    sibling, _ = start(machine, gpu)
    tell(sibling, "begin_capture", mode="global", stream=0)
    tell(sibling, "begin_capture", mode="relaxed", stream=1)
    assert [tell(sibling, "end_capture", stream=it) for it in (0, 1)] == [2, 2]


def test_a_capture_that_another_thread_ended(machine: Machine, gpu: simgpu.SimGpu) -> None:
    sibling, device = start(machine, gpu, flags=0)
    holder = machine.actor("--device", device)
    tell(sibling, "begin_capture", mode="global")
    said = tell(sibling, "end_capture_elsewhere")
    assert said == "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"
    tell(sibling, "launch", seconds=0.3, stream=0)
    tell(sibling, "launch", seconds=0.01)
    holder.do("enter", drain_timeout=10)
    entered = time.monotonic_ns()
    assert holder.do("leave")["siblings"][0]["drained"] == "streams"
    assert last_idle(gpu, sibling) < entered


@pytest.mark.parametrize("with_current", [True, False], ids=["current", "no context"])
def test_a_destroyed_streams_work_is_drained(
    machine: Machine, gpu: simgpu.SimGpu, with_current: bool
) -> None:
    sibling, device = start(machine, gpu)
    holder = machine.actor("--device", device)
    tell(sibling, "launch", seconds=0.3, stream=1)
    tell(sibling, "destroy_stream", stream=1, with_current=with_current)
    holder.do("enter", drain_timeout=10)
    entered = time.monotonic_ns()
    assert holder.do("leave")["siblings"][0]["drained"] == "streams"
    assert last_idle(gpu, sibling) < entered


def test_a_sibling_killed_inside_of_the_driver(machine: Machine, gpu: simgpu.SimGpu) -> None:
    sibling, device = start(machine, gpu)
    holder = machine.actor("--device", device)
    tell(sibling, "kill_self_at", seconds=0.5)
    sibling.send("call", module="cuda_client", function="copy_back", arguments={"seconds": 60})
    report = holder.do("whole", drain_timeout=20)
    assert report["drain_s"] < 15
    with pytest.raises(EOFError):
        sibling.answer()


def test_all_threads_are_counted(machine: Machine, gpu: simgpu.SimGpu) -> None:
    holder, _ = start(machine, gpu)
    tell(holder, "synchronize")
    before = len(gpu.submissions(holder.pid))
    holder.do("enter")
    tell(holder, "set_memory", count=50, threads=8)
    report = holder.do("leave")
    # The drain's own event is not a submission of the program's.
    entries = [it for it in gpu.submissions(holder.pid)[before:] if it.kind == "memset"]
    assert report["submissions"] == len(entries) == 400


def test_a_fork_submits_in_a_slot_of_its_own(machine: Machine, gpu: simgpu.SimGpu) -> None:
    parent = machine.actor(env=gpu.environment)
    outcome = tell(parent, "fork_and_submit", count=3)
    assert outcome["status"] == 0
    assert len([it for it in gpu.submissions(outcome["pid"]) if it.kind == "memset"]) == 3
    device = tell(parent, "begin")
    assert tell(parent, "fork_and_idle") == 0
    tell(parent, "launch", seconds=0.2)
    assert tell(parent, "fork_and_idle") == 0
    report = machine.actor("--device", device).do("whole", drain_timeout=10)
    assert report["siblings"][0]["drained"] == "streams"


def test_without_krex_everything_passes(machine: Machine, gpu: simgpu.SimGpu) -> None:
    """The library alone, with no segment there, leaves a program as it is."""
    library = Path(sys.prefix) / "lib" / "krex" / "libkrex_preload.so"
    code = "import cuda_client as c; print(c.begin()); c.launch(); print(c.synchronize())"
    environment = dict(
        gpu.environment, LD_PRELOAD=str(library), PYTHONPATH=os.path.dirname(__file__)
    )
    done = machine.run([sys.executable, "-c", code], env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "0"
    assert not (machine.runtime_dir / "segment").exists()


def test_a_sibling_without_the_interposer_is_unknown(machine: Machine, gpu: simgpu.SimGpu) -> None:
    holder, device = start(machine, gpu)
    sibling = machine.actor("--device", device, env={"KREX_PRELOAD": "0", **gpu.environment})
    report = holder.do("whole")
    assert report["verdict"] == "unknown"
    assert "without krex's interposer" in report["reasons"][0]
    assert sibling.quit() == 0
    assert holder.do("whole")["verdict"] == "clean"


def test_other_preloaded_libraries_stay(machine: Machine) -> None:
    libc = re.findall(r"\S+libc\.so\.6", Path("/proc/self/maps").read_text())[0]
    code = "import os; print(os.environ.get('LD_PRELOAD'))"
    command = ["run", "--", sys.executable, "-c", code]
    library = str(Path(sys.prefix) / "lib" / "krex" / "libkrex_preload.so")
    for before, after in [(None, library), (libc, f"{library}:{libc}"), (library, library)]:
        env = {"LD_PRELOAD": before} if before else {}
        assert machine.krex(*command, env=env).stdout.strip() == after
    off = machine.krex(*command, env={"KREX_PRELOAD": "0", "LD_PRELOAD": libc})
    assert off.stdout.strip() == libc


C_PROGRAM = Path(__file__).with_name("interposed.c")


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment with a driver that behaves badly: see fake_driver.c."""
    directory = tmp_path_factory.mktemp("fake")
    source = Path(__file__).with_name("fake_driver.c")
    # With unwind tables, as a thread's cancellation needs them.
    options = ["-Wall", "-Werror", "-O1", "-fexceptions", "-fPIC", "-shared", "-lpthread"]
    library = directory / "libcuda.so.1"
    subprocess.run(["cc", *options, "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    return {"LD_LIBRARY_PATH": str(directory)}


BEGIN_FAKE = """
import ctypes
library = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert library.cuInit(0) == 0
assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
memset = lambda: library.cuMemsetD8_v2(ctypes.c_uint64(0), 1, ctypes.c_size_t(16))
assert memset() == 0
"""
FAKE_DEVICE = "GPU-" + "-".join("fa" * it for it in (4, 2, 2, 2, 6))


def test_calls_within_calls_pass(machine: Machine, fake_driver: dict[str, str]) -> None:
    actor = machine.actor(env=fake_driver)
    code = BEGIN_FAKE + (
        "with region.critical() as critical:\n"
        "    for _ in range(5): assert memset() == 0\n"
        "count = lambda name: ctypes.c_int.in_dll(library, name).value\n"
        "report = critical.report\n"
        "value = [report.device, report.submissions, count('outer_calls'), count('inner_calls')]\n"
    )
    assert actor.do("run", code=code) == [FAKE_DEVICE, 5, 6, 6]


RESOLVE = """
def resolve(name, *types):
    found = ctypes.c_void_p()
    flags = ctypes.c_uint64(0)
    assert library.cuGetProcAddress_v2(name, ctypes.byref(found), 12000, flags, None) == 0
    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(found.value)
number = ctypes.c_uint64
"""


def test_what_the_driver_hands_out_is_exchanged(
    machine: Machine, fake_driver: dict[str, str]
) -> None:
    """By its address if the driver exports it, else by name and version."""
    actor = machine.actor(env=fake_driver)
    code = (
        BEGIN_FAKE
        + RESOLVE
        + (
            "memset = resolve(b'cuMemsetD16', number, ctypes.c_uint16, number)\n"
            "copy = resolve(b'cuMemcpyDtoDAsync', number, number, number, number)\n"
            "with region.critical() as critical:\n"
            "    for _ in range(3): assert memset(0, 1, 16) == 0\n"
            "    for _ in range(4): assert copy(0, 0, 16, 0) == 0\n"
            "count = ctypes.c_int.in_dll(library, 'outer_calls').value\n"
            "value = [critical.report.submissions, count, critical.report.verdict]\n"
        )
    )
    assert actor.do("run", code=code) == [7, 8, "clean"]


def test_who_uses_an_unknown_function_is_not_fully_gated(
    machine: Machine, fake_driver: dict[str, str]
) -> None:
    sibling = machine.actor(env=fake_driver)
    sibling.do("run", code=BEGIN_FAKE + RESOLVE + "resolve(b'cuLaunchSomethingNew')\nvalue = 0\n")
    [tenant] = [it for it in machine.status()["tenants"] if it["pid"] == sibling.pid]
    assert [it["fully_gated"] for it in tenant["submitters"]] == [False]
    report = machine.actor("--device", FAKE_DEVICE).do("whole")
    assert report["verdict"] == "contended"
    assert "this krex does not know" in report["reasons"][0]


def test_a_cancelled_thread_leaves_no_count(machine: Machine, fake_driver: dict[str, str]) -> None:
    sibling = machine.actor(env=fake_driver)
    code = BEGIN_FAKE + "value = library.cancel_one()"
    assert sibling.do("run", code=code) == 1
    report = machine.actor("--device", FAKE_DEVICE).do("whole", drain_timeout=20)
    assert report["siblings"][0]["drained"] == "streams"
    assert report["drain_s"] < 10


def test_a_jump_out_of_the_driver_is_no_way_past_the_gate(
    machine: Machine, fake_driver: dict[str, str], tmp_path: Path
) -> None:
    actor = machine.actor(env=fake_driver)
    assert actor.do("run", code=BEGIN_FAKE + "value = library.jump_out()") == 1
    held, go = tmp_path / "held", tmp_path / "go"
    # What it left behind in the count is waited for no longer than that.
    arguments = {"device": FAKE_DEVICE, "held": str(held), "go": str(go), "drain_timeout": 0.2}
    actor.send("call", module="cuda_client", function="start_child", arguments=arguments)
    actor.answer()
    wait_until(held.exists, "the child is in its region")
    # Deeper in the stack than the call that was left.
    actor.send("run", code=BEGIN_FAKE + "value = memset()")
    assert actor.poll_answer(0.3) is None
    go.touch()
    assert actor.answer() == 0
    report = json.loads(wait_until(lambda: held.read_text(), "the report"))
    assert [it["drained"] for it in report["siblings"]] == ["timed out"]
    assert report["verdict"] == "contended"


@pytest.fixture(scope="session")
def c_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("c") / "interposed"
    # Built with the interposer's host compiler, linked to nothing of krex's.
    subprocess.run(
        ["cc", "-Wall", "-Werror", "-O1", "-o", program, C_PROGRAM, "-ldl", "-lpthread"], check=True
    )
    return program


@pytest.mark.parametrize(
    "case", ["handle", "default", "next", "unknown", "absent", "reload", "resolver"]
)
def test_ways_to_the_driver(
    machine: Machine, gpu: simgpu.SimGpu, c_program: Path, case: str
) -> None:
    done = machine.krex("run", "--", c_program, case, env=gpu.environment)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{case} ok\n")
