"""The region as its users see it."""

from __future__ import annotations

import pytest
from harness import ActorError, Machine, is_frozen, wait_until


def test_siblings_are_frozen_and_thawed(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling = machine.actor(), machine.actor()
    sibling.send("spin", seconds=0.2)
    epoch = holder.do("enter")
    assert is_frozen(sibling.pid)
    assert machine.device()["phase"] == "held"
    assert machine.tenants()[sibling.pid]["state"] == "frozen"
    assert machine.tenants()[holder.pid]["state"] == "in_critical_region"
    holder.do("spin", seconds=0.1)
    report = holder.do("leave")
    assert report["epoch"] == epoch
    assert report["verdict"] == "clean", report
    (entry,) = report["siblings"]
    assert entry["frozen"] == machine.freezer
    assert entry["drained"] == "idle"
    assert report["held_s"] >= 0.1
    wait_until(lambda: not is_frozen(sibling.pid))
    assert sibling.answer() > 0


def test_a_submission_waits_for_the_gate(machine: Machine) -> None:
    holder, sibling = machine.actor(), machine.actor(bare=True)
    sibling.do("submit")
    holder.do("enter")
    sibling.send("submit")
    holder.do("spin", seconds=0.1)
    assert sibling.poll_answer() is None
    report = holder.do("leave")
    assert report["siblings"][0]["submissions"] == 0
    assert sibling.answer() > 0


def test_another_device_in_a_region_is_an_error(machine: Machine) -> None:
    actor = machine.actor()
    actor.do("enter")
    with pytest.raises(ActorError, match="cpu:1") as caught:
        actor.do("enter", device="cpu:1")
    assert caught.value.kind == "RegionError"
    assert actor.do("leave")["verdict"] == "clean"
