"""The region as its users see it."""

from __future__ import annotations

import json

import pytest
from harness import ActorError, Machine, is_frozen, wait_until


@pytest.fixture
def turning_back_machine(machine: Machine) -> Machine:
    """Siblings are turned back but not frozen, so that one can be watched while it waits."""
    machine.environment["KREX_SABOTAGE"] = "freeze"
    return machine


ALONE = [
    "nested_in_its_thread",
    "other_threads_queue",
    "a_thread_times_out",
    "one_object_in_many_threads",
    "decorated",
    "deferred_bodies_are_refused",
    "inside_a_generator",
    "forgotten",
    "exceptions_pass_through",
    "left_without_being_entered",
    "callbacks",
    "failing_callbacks",
    "callbacks_of_a_callback",
    "report_fields",
    "report_too_early",
    "bad_arguments",
    "another_device_inside",
    "a_fork_never_leaves_its_parents_region",
    "a_fork_joins_its_parents_region",
    "a_fork_outside_of_a_region_is_excluded_by_its_parents",
    "threads_and_forks",
    "revoked_past_max_hold",
    "revoked_with_an_exception_of_its_own",
    "phases",
    "no_threads_are_started",
]


@pytest.mark.parametrize("bare", [False, True], ids=["run", "bare"])
@pytest.mark.parametrize("case", ALONE)
def test_alone(machine: Machine, case: str, bare: bool) -> None:
    """The case of that name in cases.py, under `krex run` and as a bare process."""
    actor = machine.actor(bare=bare)
    actor.call(case)
    assert actor.quit() == 0


@pytest.mark.parametrize("case", ["a_fork_joins_its_parents_region", "forgotten"])
def test_beside_a_sibling(freezing_machine: Machine, case: str) -> None:
    sibling = freezing_machine.actor()
    actor = freezing_machine.actor()
    actor.call(case)
    assert sibling.do("ping") == sibling.pid
    wait_until(freezing_machine.nobody_is_frozen)


def test_siblings_are_frozen_and_thawed(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling = machine.actor(), machine.actor()
    sibling.send("spin", seconds=0.2)
    epoch = holder.do("hold")["epoch"]
    assert is_frozen(sibling.pid)
    assert machine.device()["phase"] == "held"
    assert machine.tenants()[sibling.pid]["state"] == "frozen"
    assert machine.tenants()[holder.pid]["state"] == "in_critical_region"
    holder.do("spin", seconds=0.1)
    report = holder.do("leave")
    assert machine.device()["phase"] == "open", "by the leaver itself, not by its supervisor"
    assert report["epoch"] == epoch
    assert report["verdict"] == "clean", report
    (entry,) = report["siblings"]
    assert entry["frozen"] == machine.freezer
    assert entry["drained"] == "idle"
    assert report["held_s"] >= 0.1
    wait_until(lambda: not is_frozen(sibling.pid))
    assert sibling.answer() > 0


def test_another_device_in_a_region_is_an_error(machine: Machine) -> None:
    actor = machine.actor()
    actor.do("hold")
    with pytest.raises(ActorError, match="cpu:1") as caught:
        actor.do("hold", device="cpu:1")
    assert caught.value.kind == "RegionError"
    assert actor.do("leave")["verdict"] == "clean"


def test_the_device_is_the_one_that_krex_run_named(machine: Machine) -> None:
    actor = machine.actor("--device", "cpu:b", "--device", "cpu:c")
    actor.do("hold")
    assert machine.device("cpu:b")["phase"] == "held"
    assert actor.do("leave")["device"] == "cpu:b"
    actor.do("hold", device="cpu:c")
    assert actor.do("leave")["device"] == "cpu:c"
    assert machine.tenants()[actor.pid]["devices"] == ["cpu:b", "cpu:c"]


# Waiting


def test_a_timeout_names_the_holder(turning_back_machine: Machine) -> None:
    machine = turning_back_machine
    holder, waiter = machine.actor("--name", "the holder"), machine.actor()
    holder.do("hold")
    holder.send("spin", seconds=1.0)
    for _ in range(2):
        with pytest.raises(ActorError, match="the holder") as caught:
            waiter.do("hold", timeout=0.1)
        assert caught.value.kind == "RegionTimeout"
        assert "cpu" in caught.value.message
        assert machine.device()["queue"] == []
    with pytest.raises(ActorError, match="the holder") as caught:
        waiter.do("submit", timeout=0.1)
    assert caught.value.kind == "RegionTimeout"
    holder.answer()
    holder.do("leave_anyhow")
    waiter.do("hold", timeout=30)
    waiter.do("leave_anyhow")


def test_higher_priorities_go_first_and_equals_in_their_order(
    turning_back_machine: Machine,
) -> None:
    machine = turning_back_machine
    holder = machine.actor()
    waiters = {name: machine.actor("--name", name) for name in ("low", "first", "second", "high")}
    holder.do("hold")
    for name, priority in [("low", -1), ("first", 0), ("second", 0), ("high", 5)]:
        waiters[name].send("hold", priority=priority)
        wait_until(lambda name=name: name in machine.device()["queue"])
    assert machine.device()["queue"] == ["high", "first", "second", "low"]
    holder.do("leave_anyhow")
    order = []
    while waiters:
        name = wait_until(lambda: machine.device()["holder"])
        waiter = waiters.pop(name)
        waiter.answer()
        waiter.do("leave_anyhow")
        order.append(name)
    assert order == ["high", "first", "second", "low"]


@pytest.mark.parametrize("command", ["region", "submission"])
def test_ctrl_c_ends_the_wait(turning_back_machine: Machine, command: str) -> None:
    machine = turning_back_machine
    holder, waiter = machine.actor(), machine.actor()
    holder.do("hold")
    holder.send("spin", seconds=1.5)
    waiter.call("interrupted_while_waiting", command=command, device="cpu")
    assert machine.device()["phase"] == "held"
    holder.answer()
    holder.do("leave_anyhow")
    waiter.do("hold")
    waiter.do("leave_anyhow")


# Revocation


def test_past_max_hold_everybody_is_released(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling, waiter = machine.actor(), machine.actor(), machine.actor()
    holder.do("hold", max_hold=0.3)
    assert is_frozen(sibling.pid)
    holder.send("spin", seconds=1.0)
    assert sibling.do("ping") == sibling.pid
    waiter.do("hold")
    holder_report_comes_later = waiter.do("leave_anyhow")
    assert holder_report_comes_later["verdict"] != "revoked"
    holder.answer()
    with pytest.raises(ActorError, match="max_hold") as caught:
        holder.do("leave")
    assert caught.value.kind == "RegionRevoked"
    wait_until(machine.nobody_is_frozen)


def test_a_revoked_holder_touches_nothing_of_its_successor(machine: Machine) -> None:
    """I6: its leaving neither opens the gate nor thaws anybody."""
    holder, successor = machine.actor("--name", "holder"), machine.actor("--name", "successor")
    third = machine.actor()
    holder.do("hold", max_hold=0.2)
    holder.send("spin", seconds=0.5)
    wait_until(lambda: machine.device()["phase"] == "open")
    holder.answer()
    # A bare sibling of another device keeps running while the successor holds its region.
    epoch = successor.do("hold")["epoch"]
    successor.send("spin", seconds=1.0)
    holder.send("leave_anyhow")
    successor.answer()
    assert machine.device()["holder"] == "successor"
    assert machine.device()["epoch"] == epoch
    assert is_frozen(third.pid)
    assert successor.do("leave")["verdict"] == "clean"
    assert holder.answer()["verdict"] == "revoked"


# Descendants


@pytest.mark.parametrize("launcher", ["bare", "krex run"])
def test_a_descendant_joins_and_runs(freezing_machine: Machine, launcher: str) -> None:
    machine = freezing_machine
    holder, sibling = machine.actor(), machine.actor()
    holder.do("hold")
    assert is_frozen(sibling.pid)
    code = f"""
import json, subprocess, sys, sysconfig
inner = '''
import json, krex.region as region
with region.critical(label="inner") as timed:
    pass
print(json.dumps(timed.report.to_dict()))
'''
command = [sys.executable, "-c", inner]
if {launcher == "krex run"}:
    command = [sysconfig.get_path("scripts") + "/krex", "run", "--", *command]
value = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
"""
    joined = holder.do("run", code=code)
    assert joined["joined"]
    assert joined["label"] == "inner"
    assert [it["name"] for it in joined["siblings"]] == [machine.tenants()[sibling.pid]["name"]]
    assert joined["verdict"] in ("clean", "unknown")
    assert is_frozen(sibling.pid)
    assert machine.device()["phase"] == "held"
    report = holder.do("leave")
    assert not report["joined"]
    assert report["epoch"] == joined["epoch"]
    assert report["verdict"] == "clean", report
    assert len(report["siblings"]) == 1


def test_a_child_that_outlives_the_region_is_a_tenant_of_its_own(machine: Machine) -> None:
    """Forked inside the region, it holds nothing afterwards, and is excluded like anybody."""
    holder, sibling = machine.actor(), machine.actor()
    holder.do("hold")
    child = holder.do(
        "run",
        code="""
import os, time
reader, writer = os.pipe()
value = os.fork()
if value == 0:
    try:
        os.close(writer)
        os.read(reader, 1)  # the region is over
        with region.critical(timeout=20) as own:
            pass
        os._exit(0 if not own.report.joined else 1)
    finally:
        os._exit(2)
os.close(reader)
entered.append(writer)
""",
    )
    holder.do("run", code="import os\nos.write(entered.pop(), b'x')")
    # It joined or waits: either way it must not be able to leave the holder's region.
    assert machine.device()["phase"] == "held"
    holder.do("leave")
    holder.do("run", code=f"import os\nvalue = os.waitpid({child}, 0)[1]")
    sibling.do("hold")
    assert sibling.do("leave")["verdict"] == "clean"


# Time that is lost


def test_time_excluded_is_what_a_sibling_lost(machine: Machine) -> None:
    holder, sibling = machine.actor(), machine.actor()
    holder.do("hold")
    holder.do("spin", seconds=0.2)
    held = holder.do("leave")["held_s"]
    wait_until(lambda: not is_frozen(sibling.pid))
    sibling.do("hold")
    first = sibling.do("leave")["time_excluded_s"]
    sibling.do("hold")
    second = sibling.do("leave")["time_excluded_s"]
    assert first >= held >= 0.2
    assert second < first


# What is shown


def test_status_shows_the_states(machine: Machine) -> None:
    holder, sibling = machine.actor("--name", "A (1)"), machine.actor("--name", "B")
    sibling.do("say", phase="compiling")
    assert machine.tenants()[sibling.pid]["state"] == "compiling"
    holder.do("hold", label="timing")
    text = machine.krex("status").stdout
    shown = json.loads(machine.krex("status", "--json").stdout)
    holder.do("leave")
    states = {it["name"]: (it["state"], it["phase"]) for it in shown["tenants"]}
    assert states == {"A (1)": ("in_critical_region", "idle"), "B": ("frozen", "compiling")}
    (device,) = shown["devices"]
    assert (device["name"], device["phase"], device["holder"]) == ("cpu", "held", "A (1)")
    assert device["label"] == "timing"
    for word in ("A (1)", "in_critical_region", "frozen", "held", "timing"):
        assert word in text
