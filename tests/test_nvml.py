"""What NVIDIA's management library says before and after a region, and what that does to it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml
from harness import Machine, wait_until
from test_namespaces import INIT, UNSHARE

UUID = "GPU-00112233-4455-6677-8899-aabbccddee00"
PART = "MIG-11112222-3333-4444-5555-666677778888"
GPU = f"gpu {UUID} NVIDIA_H200"


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    nvml = FakeNvml(tmp_path)
    nvml.say(GPU, "clock 1980", "events 1")
    return nvml


@pytest.fixture
def stranger(machine: Machine) -> Iterator[int]:
    """A process that krex does not know. This one would not do: it is an ancestor of nobody."""
    process = machine.start([sys.executable, "-c", "input()"], stdin=-1)
    yield process.pid
    process.kill()


def whole(machine: Machine, nvml: FakeNvml, **options: Any) -> dict[str, Any]:
    actor = machine.actor("--device", options.pop("device", UUID), env=nvml.environment)
    report: dict[str, Any] = actor.do("whole", **options)
    actor.quit()
    return report


def test_a_region_has_the_clocks_of_before_and_after(machine: Machine, nvml: FakeNvml) -> None:
    report = whole(machine, nvml)
    assert report["verdict"] == "clean", report["reasons"]
    look = {"sm_mhz": 1980, "events": ["gpu_idle"], "processes": 0}
    assert report["clocks"] == {"before": look, "after": look}
    assert report["gpu"] == "0: NVIDIA H200"


def test_nobody_looks_within_a_region(machine: Machine, nvml: FakeNvml) -> None:
    """Nor does anybody else who is about to enter one, nor one that joins it."""
    holder = machine.actor("--device", UUID, env=nvml.environment)
    holder.do("whole")
    holder.do("hold")
    entered = len(nvml.calls())
    assert entered > 0
    holder.do("enter")
    assert holder.do("leave")["clocks"] is None
    bare = machine.actor(bare=True, env=nvml.environment)
    bare.do("say", phase="idle")
    bare.send("whole", device=UUID)
    wait_until(lambda: UUID in machine.tenants()[bare.pid]["devices"], "it is about to claim")
    assert len(nvml.calls()) == entered
    report = holder.do("leave")
    assert report["clocks"]["before"] is not None
    # It came while somebody was inside: it has the second look only.
    assert bare.answer()["clocks"]["before"] is None
    assert len(nvml.calls()) > entered


def test_no_thread_is_left_in_the_region(machine: Machine, nvml: FakeNvml) -> None:
    actor = machine.actor("--device", UUID, env=nvml.environment)
    code = (
        "import os, threading, time\n"
        "before = len(os.listdir('/proc/self/task')), threading.active_count()\n"
        "with region.critical():\n"
        "    time.sleep(0.05)\n"
        "    inside = len(os.listdir('/proc/self/task')), threading.active_count()\n"
        "value = [before, inside]"
    )
    before, inside = actor.do("run", code=code)
    assert before == inside


@pytest.mark.parametrize(
    ("mask", "verdict"),
    [
        (0x4, "clean"),  # the power cap
        (0x1 | 0x2 | 0x10 | 0x100, "clean"),
        (0x8, "throttled"),
        (0x20, "throttled"),
        (0x40, "throttled"),
        (0x80, "throttled"),
    ],
)
def test_a_slowed_gpu(machine: Machine, nvml: FakeNvml, mask: int, verdict: str) -> None:
    nvml.say(GPU, "clock 1200", f"events {mask:x}")
    report = whole(machine, nvml)
    assert report["verdict"] == verdict, report["reasons"]
    assert report["clocks"]["after"]["events"]
    if verdict == "throttled":
        assert "1200 MHz" in report["reasons"][0]


def test_a_process_that_krex_does_not_know(machine: Machine, nvml: FakeNvml, stranger: int) -> None:
    sibling = machine.actor("--device", UUID)
    holder = machine.actor("--device", UUID, env=nvml.environment)
    child = holder.do("run", code="import subprocess; c = subprocess.Popen(['sleep', '60']); "
                      "globals()['kept'] = c; value = c.pid")  # fmt: skip
    machine.pids.add(child)
    nvml.say(GPU, *(f"process {pid}" for pid in (sibling.pid, holder.pid, child)))
    report = holder.do("whole")
    assert report["verdict"] == "clean", report["reasons"]
    assert report["clocks"]["before"]["processes"] == 3
    # A process that ended since is nobody's.
    nvml.say(GPU, f"process {sibling.pid}", f"process {stranger}", "process 4194000")
    report = holder.do("whole")
    assert report["verdict"] == "foreign"
    assert len(report["reasons"]) == 1
    assert f"{stranger} (" in report["reasons"][0]
    assert "krex run" in report["reasons"][0]


def test_the_worst_verdict_stands(machine: Machine, nvml: FakeNvml, stranger: int) -> None:
    nvml.say(GPU, "events 40", f"process {stranger}")
    report = whole(machine, nvml)
    assert report["verdict"] == "foreign"
    assert len(report["reasons"]) == 3  # slowed before and after, and the stranger
    assert whole(machine, nvml, seconds=3, max_hold=0.1)["verdict"] == "revoked"


@pytest.mark.parametrize(
    "says", [["init 9"], ["init 12"], ["gpu GPU-ffffffff-4455-6677-8899-aabbccddee00 Other"]]
)
def test_nothing_to_look_with(machine: Machine, nvml: FakeNvml, says: list[str]) -> None:
    nvml.say(*says)
    report = whole(machine, nvml)
    assert (report["verdict"], report["clocks"], report["gpu"]) == ("clean", None, None)


def test_without_the_binding_nobody_looks(machine: Machine, nvml: FakeNvml, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('not here')")
    actor = machine.actor(
        "--device", UUID, env={**nvml.environment, "PYTHONPATH": str(tmp_path)}
    )  # fmt: skip
    report = actor.do("whole")
    assert (report["verdict"], report["clocks"]) == ("clean", None)
    assert nvml.calls() == []


def test_regions_on_the_cpu_do_not_look(machine: Machine, nvml: FakeNvml) -> None:
    report = whole(machine, nvml, device="cpu")
    assert (report["verdict"], report["clocks"]) == ("clean", None)
    assert nvml.calls() == []


def test_what_a_gpu_does_not_tell_is_left_out(machine: Machine, nvml: FakeNvml) -> None:
    nvml.say(
        GPU,
        "fail nvmlDeviceGetClockInfo 3",
        "fail nvmlDeviceGetCurrentClocksEventReasons 3",
        "fail nvmlDeviceGetComputeRunningProcesses_v3 4",
    )
    report = whole(machine, nvml)
    assert report["verdict"] == "clean", report["reasons"]
    assert report["clocks"]["after"] == {"sm_mhz": None, "events": [], "processes": 0}


def test_a_part_of_a_gpu_has_the_clock_of_the_whole(machine: Machine, nvml: FakeNvml) -> None:
    nvml.say(GPU, f"part {PART}", "clock 1980")
    report = whole(machine, nvml, device=PART)
    assert report["verdict"] == "clean", report["reasons"]
    assert report["clocks"]["after"]["sm_mhz"] == 1980


def test_a_gpu_that_is_lost_between_two_regions(machine: Machine, nvml: FakeNvml) -> None:
    actor = machine.actor("--device", UUID, env=nvml.environment)
    assert actor.do("whole")["verdict"] == "clean"
    nvml.say(GPU, "lost 0")
    report = actor.do("whole")
    assert (report["verdict"], report["clocks"]) == ("unknown", None)
    assert "GPU is lost" in report["reasons"][0]


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetClockInfo"])
def test_a_library_that_hangs_is_left_behind(
    machine: Machine, nvml: FakeNvml, function: str
) -> None:
    nvml.say(GPU, f"hang {function}")
    actor = machine.actor("--device", UUID, env=nvml.environment)
    report = actor.do("whole")
    assert (report["verdict"], report["clocks"]) == ("unknown", None)
    assert "did not answer within 5 s, before" in report["reasons"][0]
    # It is not asked again.
    started = time.monotonic()
    report = actor.do("whole")
    assert time.monotonic() - started < 3
    assert report["verdict"] == "unknown"
    asked = len(nvml.calls())
    # Nor does it keep the process from forking, or from ending.
    code = "import os; pid = os.fork()\nif pid == 0: os._exit(0)\nvalue = os.waitpid(pid, 0)[1]"
    assert actor.do("run", code=code) == 0
    assert actor.quit() == 0
    assert len(nvml.calls()) == asked


def test_a_forked_child_starts_the_library_anew(
    machine: Machine, nvml: FakeNvml, tmp_path: Path
) -> None:
    actor = machine.actor("--device", UUID, env=nvml.environment)
    actor.do("whole")
    out = tmp_path / "out"
    code = (
        "import os\n"
        "if os.fork() == 0:\n"
        "    with region.critical() as critical: pass\n"
        f"    open({str(out)!r}, 'w').write(str(critical.report.clocks['after']))\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    actor.do("run", code=code)
    assert "1980" in out.read_text()
    inits = {it.pid for it in nvml.calls() if it.function == "nvmlInitWithFlags"}
    assert len(inits) == 2


def test_status_names_the_gpus(machine: Machine, nvml: FakeNvml) -> None:
    machine.actor("--device", UUID)
    assert f"{UUID} is GPU 0, NVIDIA H200" in machine.krex("status", env=nvml.environment).stdout
    nvml.say(GPU, "hang nvmlInit_v2")
    done = machine.krex("status", env=nvml.environment)
    assert done.returncode == 0
    assert UUID in done.stdout
    assert "is GPU 0" not in done.stdout


def test_a_list_that_numbers_processes_as_the_host_does(machine: Machine, nvml: FakeNvml) -> None:
    """Below the first PID namespace there may be nothing but the count to go by."""
    if os.geteuid() != 0:
        pytest.skip("a PID namespace of one's own takes root")
    wrapper = [*UNSHARE, *INIT]
    actor = machine.actor("--device", UUID, env=nvml.environment, wrapper=wrapper)
    machine.pids.discard(actor.pid)
    nvml.say(GPU, "process 3000000", "process 3000001", "process 3000002")
    report = actor.do("whole")
    assert report["verdict"] == "unknown"
    assert "lists 3 processes" in report["reasons"][0]
    nvml.say(GPU, "process 3000000")
    assert actor.do("whole")["verdict"] == "clean"
    # On the list under its own number: the others mean what they say.
    nvml.say(GPU, f"process {actor.pid}", "process 1")
    assert actor.do("whole")["verdict"] in ("clean", "foreign")
    actor.quit()
