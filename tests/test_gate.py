"""Submissions, and the gate and counter for those who gate something of their own."""

from __future__ import annotations

import itertools

import pytest
from harness import ActorError, Machine, is_frozen, wait_until


@pytest.mark.parametrize("bare", [False, True], ids=["run", "bare"])
@pytest.mark.parametrize(
    "case",
    [
        "gate_of_one_process",
        "counter_of_one_process",
        "submissions_in_threads",
        "submission_left_by_an_exception",
        "fork_with_a_submission",
    ],
)
def test_alone(machine: Machine, case: str, bare: bool) -> None:
    """The case of that name in cases.py, under `krex run` and as a bare process."""
    machine.actor(bare=bare).call(case)


# Submissions


def test_a_submission_waits_for_the_gate(machine: Machine) -> None:
    holder, sibling = machine.actor(), machine.actor(bare=True)
    sibling.do("submit")
    holder.do("hold")
    sibling.send("submit")
    holder.do("spin", seconds=0.1)
    assert sibling.poll_answer() is None
    report = holder.do("leave")
    assert report["siblings"][0]["submissions"] == 0
    assert sibling.answer() > 0


def test_what_is_in_flight_is_waited_for(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling = machine.actor(), machine.actor()
    sibling.do("begin_submission")
    holder.send("hold", drain_timeout=20)
    wait_until(lambda: machine.device()["phase"] == "closing")
    assert not is_frozen(sibling.pid)
    sibling.send("end_submission")  # it may be frozen before it has answered
    holder.answer()
    assert is_frozen(sibling.pid)
    report = holder.do("leave")
    assert report["verdict"] == "clean", report
    # Idle, if it ended before its supervisor looked for the first time.
    assert report["siblings"][0]["drained"] in ("counted", "idle")
    sibling.answer()


def test_what_stays_in_flight_is_named(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling = machine.actor(), machine.actor("--name", "never ready")
    sibling.do("begin_submission")
    holder.do("hold", drain_timeout=0.1)
    report = holder.do("leave")
    assert report["verdict"] == "contended"
    assert report["siblings"][0]["drained"] == "timed out"
    assert any("never ready" in it and "drain_timeout" in it for it in report["reasons"]), report
    sibling.do("end_submission")
    holder.do("hold")
    assert holder.do("leave")["verdict"] == "clean"


def test_what_a_dead_process_had_in_flight_does_not_count(machine: Machine) -> None:
    """I7."""
    holder, sibling = machine.actor(), machine.actor()
    sibling.do("begin_submission")
    sibling.kill()
    holder.do("hold", drain_timeout=30)
    assert holder.do("leave")["verdict"] == "clean"


def test_a_submission_of_a_descendant_passes(machine: Machine) -> None:
    """The gate is closed for all but the holder and what it started."""
    holder = machine.actor()
    holder.do("hold")
    code = "import krex\nwith krex.submission(timeout=20):\n    print('passed')\n"
    run = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-c", {code!r}], capture_output=True, text=True)
value = done.stdout + done.stderr
"""
    assert holder.do("run", code=run) == "passed\n"
    assert holder.do("leave")["verdict"] == "clean"


# A gate of one's own


def test_a_gate_between_processes(machine: Machine) -> None:
    one, two = machine.actor(), machine.actor(bare=True)
    claim = "gate = krex.SharedMemoryGate('g'); region.gate = gate; value = gate.try_claim()"
    assert one.do("run", code=claim) == 1
    assert two.do("run", code=claim) is None
    assert two.do("run", code="value = region.gate.is_held_by_other") is True
    assert one.do("run", code="value = region.gate.is_held_by_other") is False
    assert two.do("run", code="value = region.gate.epoch") == 1
    with pytest.raises(ActorError):
        two.do("run", code="region.gate.release()")
    assert not machine.tenants()[two.pid]["frozen"]
    with pytest.raises(ActorError) as caught:
        two.do("run", code="krex.InFlightCounter('g').enter(timeout=0.1)")
    assert caught.value.kind == "RegionTimeout"
    two.send("run", code="value = krex.InFlightCounter('g').enter()")
    assert two.poll_answer(0.1) is None
    one.do("run", code="region.gate.release()")
    two.answer()
    count = "it = krex.InFlightCounter('g'); value = (it.count, it.total)"
    assert one.do("run", code=count) == [1, 1]
    assert one.do("run", code="value = region.gate.try_claim()") == 2
    # The holder dies: its claim and what was in flight go with it.
    one.kill()
    wait_until(lambda: two.do("run", code="value = not region.gate.is_held_by_other"))
    assert two.do("run", code="value = region.gate.try_claim()") == 3
    assert two.do("run", code=count) == [1, 1]


def test_a_gate_excludes_between_processes(machine: Machine) -> None:
    """Many claims from several processes: each epoch once, never two holders at a time."""
    actors = [machine.actor(bare=True) for _ in range(3)]
    for actor in actors:
        actor.send("call", function="claims", arguments={"count": 200})
    outcomes = [actor.answer() for actor in actors]
    epochs = sorted(epoch for outcome in outcomes for epoch in outcome["epochs"])
    assert len(set(epochs)) == len(epochs) == 600
    spans = sorted(span for outcome in outcomes for span in outcome["spans"])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_regions_device_and_a_gate_of_that_name_are_two_things(machine: Machine) -> None:
    one, two = machine.actor(), machine.actor()
    one.do("run", code="region.gate = krex.SharedMemoryGate('cpu'); region.gate.try_claim()")
    two.do("hold")
    assert two.do("leave")["verdict"] == "clean"
    assert one.do("run", code="value = region.gate.epoch") == 1
    one.do("run", code="region.gate.release()")
