"""Kernels that never end: in a sibling, in the holder; and who ends them."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from harness import LIMIT, Actor, Machine, is_running, wait_until
from simgpu import SimGpu


def tell(actor: Actor, function: str, limit: float = LIMIT, **arguments: Any) -> Any:
    """Have an actor call a function of cuda_client.py."""
    actor.send("call", module="cuda_client", function=function, arguments=arguments)
    return actor.answer(limit)


def start(machine: Machine, gpu: SimGpu, *options: str) -> tuple[Actor, str]:
    """An actor with a context, and krex's name for its device."""
    actor = machine.actor(*options, env=gpu.environment)
    return actor, tell(actor, "begin")


def stuck(machine: Machine, gpu: SimGpu, *options: str) -> tuple[Actor, Actor, str]:
    """An actor whose kernel never ends, which a region found out; and that region's holder."""
    sibling, device = start(machine, gpu, *options)
    tell(sibling, "launch", name="forever", stream=0)
    holder = machine.actor("--device", device)
    report = holder.do("whole", drain_timeout=0.3)
    assert (report["verdict"], report["siblings"][0]["drained"]) == ("contended", "timed out")
    return sibling, holder, device


def test_later_regions_do_not_wait_and_say_what_still_runs(
    machine: Machine, simgpu: SimGpu
) -> None:
    sibling, holder, _ = stuck(machine, simgpu, "--name", "endless")
    tenant = machine.tenants()[sibling.pid]
    assert (tenant["stuck"], tenant["state"]) == (True, "stuck")
    for _ in range(2):
        report = holder.do("whole", drain_timeout=30)
        assert report["drain_s"] < 10
        assert report["verdict"] == "contended"
        said = [it for it in report["reasons"] if it.startswith("endless was not drained: stuck")]
        assert f"`krex evict {sibling.pid}`" in said[0]
        # What else it submits meanwhile makes no difference.
        tell(sibling, "launch", seconds=0.001, stream=1)
    assert "stuck" in machine.krex("status").stdout


def test_one_that_comes_on_is_waited_for_again(machine: Machine, simgpu: SimGpu) -> None:
    sibling, device = start(machine, simgpu)
    holder = machine.actor("--device", device)
    tell(sibling, "launch", seconds=1.5, stream=0)
    assert holder.do("whole", drain_timeout=0.1)["siblings"][0]["drained"] == "timed out"
    assert machine.tenants()[sibling.pid]["stuck"]
    tell(sibling, "synchronize")
    wait_until(lambda: not machine.tenants()[sibling.pid]["stuck"], "it has come on")
    assert holder.do("whole")["verdict"] == "clean"
    tell(sibling, "launch", seconds=0.3, stream=0)
    assert holder.do("whole", drain_timeout=10)["siblings"][0]["drained"] == "streams"


def test_a_holder_whose_kernel_never_ends_is_revoked(machine: Machine, simgpu: SimGpu) -> None:
    holder, device = start(machine, simgpu)
    sibling, _ = start(machine, simgpu)
    holder.do("enter", max_hold=1)
    tell(holder, "launch", name="forever", stream=0)
    holder.send("leave_anyhow")
    tell(sibling, "set_memory", count=1)  # goes on once the region is revoked
    report = holder.answer()
    assert report["verdict"] == "revoked"
    assert any("could be waited for" in it for it in report["reasons"])
    # The next one need not wait for it either.
    third = machine.actor("--device", device)
    report = third.do("whole", drain_timeout=30)
    assert report["drain_s"] < 10
    assert report["verdict"] == "contended"


def test_a_driver_in_which_kernels_hang(machine: Machine, simgpu: SimGpu) -> None:
    sibling, device = start(machine, simgpu)
    simgpu.fail("hang")
    tell(sibling, "launch", seconds=0.01, stream=0)
    simgpu.fail()
    holder = machine.actor("--device", device)
    assert holder.do("whole", drain_timeout=0.3)["verdict"] == "contended"
    assert holder.do("whole", drain_timeout=30)["drain_s"] < 10


@pytest.mark.parametrize("by", ["name", "pid", "stuck"])
def test_evict_ends_it(machine: Machine, simgpu: SimGpu, by: str) -> None:
    sibling, holder, _ = stuck(machine, simgpu, "--name", "endless one")
    who = {"name": "endless one", "pid": str(sibling.pid), "stuck": "--on-stuck"}[by]
    done = machine.krex("evict", who)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"ended endless one ({sibling.pid})\n"
    assert sibling.process.wait(LIMIT) == -signal.SIGTERM
    assert is_running(holder.pid)
    report = holder.do("whole")
    assert report["verdict"] == "clean", report["reasons"]


def test_evict_kills_what_does_not_end(machine: Machine, simgpu: SimGpu) -> None:
    sibling, _, _ = stuck(machine, simgpu)
    sibling.do("run", code="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    started = time.monotonic()
    done = machine.krex("evict", "--on-stuck")
    assert done.returncode == 0
    assert sibling.process.wait(LIMIT) == -signal.SIGKILL
    assert time.monotonic() - started > 4


def test_evict_spares_who_is_not_stuck(machine: Machine, simgpu: SimGpu) -> None:
    actor, _ = start(machine, simgpu, "--name", "fine")
    assert machine.krex("evict", "--on-stuck").stdout == "nobody is stuck\n"
    assert machine.krex("evict", "fine", "--on-stuck").stdout == "fine is not stuck\n"
    assert is_running(actor.pid)
    # By hand anybody can be ended.
    assert machine.krex("evict", "fine").returncode == 0
    assert actor.process.wait(LIMIT) == -signal.SIGTERM


def test_evict_wants_to_know_whom(machine: Machine) -> None:
    done = machine.krex("evict")
    assert (done.returncode, done.stdout) == (2, "")
    assert machine.krex("evict", "--on-stuck").stdout == "nobody is stuck\n"
    done = machine.krex("evict", "nobody")
    assert (done.returncode, done.stdout) == (125, "")
    assert "krex status" in done.stderr
    twins = [machine.actor("--name", "twin") for _ in range(2)]
    done = machine.krex("evict", "twin")
    assert done.returncode == 125
    assert all(str(it.pid) in done.stderr for it in twins)


def test_who_is_stuck_is_ended_if_that_was_asked_for(machine: Machine, simgpu: SimGpu) -> None:
    sibling, device = start(machine, simgpu, "--on-stuck=kill")
    spared, _ = start(machine, simgpu)
    tell(sibling, "launch", seconds=0.3, stream=0)
    holder = machine.actor("--device", device)
    # One that ends in time is none.
    assert holder.do("whole", drain_timeout=10)["verdict"] == "clean"
    tell(sibling, "launch", name="forever", stream=0)
    # It may be gone before the region begins; else it is frozen with its work running.
    assert holder.do("whole", drain_timeout=0.3)["verdict"] in ("clean", "contended")
    assert sibling.process.wait(LIMIT) == -signal.SIGTERM
    assert is_running(spared.pid)
    wait_until(lambda: sibling.pid not in machine.tenants(), "its slot is free")
    report = holder.do("whole")
    assert report["verdict"] == "clean", report["reasons"]


def test_a_child_that_is_stuck_is_ended_without_its_parent(
    machine: Machine, simgpu: SimGpu, tmp_path: Path
) -> None:
    """What splits off from a command is ended by the command's own word, and alone."""
    parent = machine.actor("--on-stuck=kill", env=simgpu.environment)
    ready = tmp_path / "ready"
    code = (
        "import pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import cuda_client as c\n"
        "device = c.begin(); c.launch('forever', stream=0)\n"
        f"pathlib.Path({str(ready)!r}).write_text(device)\n"
        "c.synchronize()\n"
    )
    start_it = (
        "import subprocess, sys\n"
        f"value = subprocess.Popen([sys.executable, '-c', {code!r}])\n"
        "region.kept = value\n"
        "value = value.pid"
    )
    child = parent.do("run", code=start_it)
    machine.pids.add(child)
    device = wait_until(lambda: ready.exists() and ready.read_text(), "the child is stuck")
    holder = machine.actor("--device", device)
    holder.do("whole", drain_timeout=0.3)
    assert parent.do("run", code="value = region.kept.wait(30)") == -signal.SIGTERM
    assert parent.do("ping") == parent.pid
