"""Reserved CPUs: the holder's threads go there and come back, everybody else keeps off.

The tests reserve the last CPU of the machine (it has two at least), or the first and the last,
where masks of the calling thread and of all others are to be told apart.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import (
    KREX,
    LIMIT,
    Actor,
    ActorError,
    Machine,
    is_running,
    process_state,
    wait_until,
)
from test_faults import Scene

ALL = sorted(os.sched_getaffinity(0))
FIRST, LAST = ALL[0], ALL[-1]
OTHERS = ALL[:-1]
# Where the first and the last are reserved. Of two CPUs none is left; then nobody is kept off.
BETWEEN = ALL[1:-1] or ALL
SETTING = "KREX_RESERVED_CPUS"


def threads(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(int(it) for it in os.listdir(f"/proc/{pid}/task"))
    return []


def mask(thread: int) -> list[int]:
    return sorted(os.sched_getaffinity(thread))


def masks(*pids: int) -> dict[int, list[int]]:
    """The CPUs of each thread of these processes."""
    return {thread: mask(thread) for pid in pids for thread in threads(pid)}


def all_have(cpus: list[int], *pids: int) -> bool:
    return all(it == cpus for it in masks(*pids).values())


def become(cpus: list[int], *pids: int) -> None:
    wait_until(lambda: all_have(cpus, *pids), f"{pids} have {cpus}")


@pytest.fixture(params=["cgroup2", "sigstop"])
def reserving(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """A machine on which the last CPU is reserved, once per freezer."""
    yield from reserved(str(LAST), request.param)


@pytest.fixture
def one_reserved() -> Iterator[Machine]:
    yield from reserved(str(LAST))


@pytest.fixture
def two_reserved() -> Iterator[Machine]:
    yield from reserved(f"{FIRST},{LAST}")


def reserved(cpus: str, freezer: str = "auto") -> Iterator[Machine]:
    machine = Machine(freezer)
    machine.environment[SETTING] = cpus
    try:
        yield machine
    finally:
        machine.close()


def bear(machine: Machine, actor: Actor, **arguments: Any) -> int:
    """A child of the actor, which is ended with the test."""
    child = int(actor.call("bear", **arguments))
    machine.pids.add(child)
    return child


# --- in and out ---


def test_the_holder_has_the_reserved_cpu_to_itself(reserving: Machine) -> None:
    machine = reserving
    holder, sibling = machine.actor("--name", "holder"), machine.actor()
    other = machine.actor("--device", "cpu:other")
    everybody = (holder.pid, sibling.pid, other.pid)
    assert all_have(OTHERS, *everybody)
    holder.call("start_helper")
    child = bear(machine, holder)
    before = masks(*everybody, child)
    for _ in range(3):
        holder.do("hold")
        assert all_have([LAST], holder.pid, child)
        assert all_have(OTHERS, sibling.pid, other.pid)
        report = holder.do("leave")
        assert masks(*everybody, child) == before
        assert (report["cpus"], report["isolation"]) == (str(LAST), "affinity")
        assert report["isolate_s"] > 0
        assert report["verdict"] == "clean", report
    assert machine.device()["cpus"] == str(LAST)
    assert machine.device("cpu:other")["cpus"] == str(LAST)


def test_without_a_reservation_nobody_is_moved(machine: Machine) -> None:
    holder, sibling = machine.actor(), machine.actor()
    before = masks(holder.pid, sibling.pid)
    holder.do("hold")
    assert masks(holder.pid, sibling.pid) == before
    report = holder.do("leave")
    assert (report["cpus"], report["isolation"], report["isolate_s"]) == (None, "none", 0.0)
    assert masks(holder.pid, sibling.pid) == before
    assert machine.device()["cpus"] is None


def test_the_calling_thread_has_a_cpu_of_its_own(two_reserved: Machine) -> None:
    machine = two_reserved
    holder = machine.actor()
    holder.call("start_helper")
    holder.call("start_helper", cpus=[LAST])
    holder.call("start_helper", cpus=[FIRST])
    child = bear(machine, holder, by=2)
    before = masks(holder.pid, child)
    assert sorted(before.values()).count(BETWEEN) == 2
    holder.do("hold")
    inside = masks(holder.pid, child)
    assert inside.pop(holder.pid) == [FIRST]
    assert set(map(tuple, inside.values())) == {(LAST,)}
    report = holder.do("leave")
    assert report["cpus"].replace("-", ",") == f"{FIRST},{LAST}"
    assert report["verdict"] == "clean", report
    assert masks(holder.pid, child) == before


def test_what_is_born_inside_has_its_creators_mask(two_reserved: Machine) -> None:
    machine = two_reserved
    holder = machine.actor()
    created = BETWEEN[-1:]
    holder.call("start_helper", cpus=created)
    holder.do("hold")
    by_caller = [holder.call("start_helper"), bear(machine, holder)]
    by_helper = [holder.call("start_helper", by=0), bear(machine, holder, by=0)]
    assert all(mask(it) == [FIRST] for it in by_caller)
    assert all(mask(it) == [LAST] for it in by_helper)
    holder.do("leave")
    assert all(mask(it) == BETWEEN for it in by_caller)
    assert all(mask(it) == created for it in by_helper)


def test_what_is_born_inside_goes_back_without_a_parent(one_reserved: Machine) -> None:
    """A grandchild whose parent has ended, and a command that was executed."""
    machine = one_reserved
    holder = machine.actor()
    holder.do("hold")
    code = (
        "import subprocess\n"
        "command = 'sleep 1000 >/dev/null & echo $!'\n"
        "value = int(subprocess.run(['sh', '-c', command], stdout=-1).stdout)"
    )
    orphan = holder.do("run", code=code)
    machine.pids.add(orphan)
    become([LAST], orphan)
    assert holder.do("leave")["verdict"] == "clean"
    assert all_have(OTHERS, holder.pid, orphan)


def test_threads_that_come_and_go(reserving: Machine) -> None:
    """None is left behind, whenever it was born."""
    actor = reserving.actor()
    verdicts = actor.call("regions_among_threads_that_come_and_go", count=150)
    assert set(verdicts) == {"clean"}
    assert all_have(OTHERS, actor.pid)


def test_what_appears_after_the_end_goes_back(reserving: Machine) -> None:
    actor = reserving.actor()
    actor.call("late_births_go_back", reserved=LAST)
    assert all_have(OTHERS, actor.pid)


def test_a_mask_that_was_chosen_inside_stays(two_reserved: Machine) -> None:
    machine = two_reserved
    holder = machine.actor()
    holder.call("start_helper")
    holder.call("start_helper")
    holder.do("hold")
    holder.call("choose_cpus", cpus=[LAST])  # the calling thread: another's place
    holder.call("choose_cpus", by=0, cpus=BETWEEN)
    child = bear(machine, holder, cpus=BETWEEN)
    holder.do("leave")
    assert all_have(BETWEEN, holder.pid, child)
    holder.do("hold")
    assert mask(holder.pid) == [FIRST]
    holder.call("choose_cpus", cpus=BETWEEN)
    helper = threads(holder.pid)[1]
    os.sched_setaffinity(helper, [FIRST, LAST])
    holder.do("leave")
    assert all_have(BETWEEN, holder.pid, child)


def test_a_mask_that_is_chosen_inside_may_be_any(one_reserved: Machine) -> None:
    holder = one_reserved.actor()
    holder.call("start_helper")
    holder.do("hold")
    holder.call("choose_cpus", cpus=[FIRST])
    report = holder.do("leave")
    assert report["verdict"] == "unknown"
    assert "not on the reserved CPUs" in report["reasons"][0]
    after = masks(holder.pid)
    assert after.pop(holder.pid) == [FIRST]
    assert list(after.values()) == [OTHERS]


def test_an_exception_restores(reserving: Machine) -> None:
    actor = reserving.actor()
    actor.call("start_helper")
    before = masks(actor.pid)
    actor.call("region_that_raises")
    assert masks(actor.pid) == before


def test_regions_in_a_region_change_nothing(reserving: Machine) -> None:
    """Nested ones, and those of a child, are isolated by the outermost."""
    machine = reserving
    holder = machine.actor()
    before = masks(holder.pid)
    holder.do("hold")
    assert holder.do("hold")["joined"]
    assert all_have([LAST], holder.pid)
    inner = holder.do("leave")
    assert (inner["joined"], inner["cpus"]) == (True, str(LAST))
    assert inner["isolation"] == "affinity"
    assert inner["isolate_s"] == 0
    holder.call("a_childs_region_is_joined")
    assert all_have([LAST], holder.pid)
    assert holder.do("leave")["verdict"] == "clean"
    assert masks(holder.pid) == before


# --- taken away ---


def test_revoked_past_max_hold(reserving: Machine) -> None:
    machine = reserving
    holder, sibling = machine.actor(), machine.actor()
    holder.call("start_helper")
    child = bear(machine, holder)
    before = masks(holder.pid, child)
    holder.do("hold", max_hold=0.3)
    assert all_have([LAST], holder.pid, child)
    wait_until(lambda: masks(holder.pid, child) == before, "the supervisor restores")
    report = holder.do("leave_anyhow")
    assert report["verdict"] == "revoked"
    assert masks(holder.pid, child) == before
    sibling.do("whole")


def test_a_killed_holder_leaves_no_child_behind(reserving: Machine) -> None:
    machine = reserving
    holder, sibling = machine.actor(), machine.actor()
    holder.call("start_helper")
    before, inside = bear(machine, holder), 0
    holder.do("hold")
    inside = bear(machine, holder)
    assert all_have([LAST], before, inside)
    if machine.freezer == "sigstop":
        # Without a group it is known once it was seen below its parent.
        wait_until(lambda: machine.device()["held_s"] > 1.2)
    holder.kill()
    become(OTHERS, before, inside)
    assert sibling.do("whole")["verdict"] == "clean"


def test_a_stopped_holder_is_restored_from_outside(reserving: Machine) -> None:
    machine = reserving
    first, second = machine.actor(), machine.actor()
    first.call("start_helper")
    before = masks(first.pid)
    first.do("hold", max_hold=0.5)
    first.signal(signal.SIGSTOP)
    wait_until(lambda: masks(first.pid) == before, "the supervisor restores")
    # Whoever was late for an earlier tenure leaves a later one alone.
    second.do("hold", timeout=LIMIT)
    first.signal(signal.SIGCONT)
    first.send("leave_anyhow")
    assert all_have([LAST], second.pid)
    # Under SIGSTOP the test's own SIGCONT let a sibling run.
    clean = ["clean"] if machine.freezer == "cgroup2" else ["clean", "contended"]
    assert second.do("leave")["verdict"] in clean
    assert first.answer()["verdict"] == "revoked"
    assert masks(first.pid) == before
    assert first.do("whole", timeout=LIMIT)["verdict"] == "clean"


def test_what_a_stopped_holder_was_bearing_goes_back(one_reserved: Machine) -> None:
    """Also if one thread alone was seen: it may have been in the middle of a fork."""
    machine = one_reserved
    holder = machine.actor()
    assert len(threads(holder.pid)) == 1
    holder.do("hold", max_hold=0.3)
    holder.signal(signal.SIGSTOP)
    become(OTHERS, holder.pid)
    os.sched_setaffinity(holder.pid, [LAST])
    become(OTHERS, holder.pid)
    holder.signal(signal.SIGCONT)


def test_the_pair_is_killed_and_the_holder_too(one_reserved: Machine) -> None:
    machine = one_reserved
    holder = machine.actor()
    child = bear(machine, holder)
    holder.do("hold")
    machine.kill_supervisor()
    holder.kill()
    assert all_have([LAST], child)
    assert machine.krex("recover").returncode == 0
    become(OTHERS, child)


@pytest.mark.parametrize("half", ["worker_pid", "pid"])
def test_a_half_of_the_pair_is_killed(one_reserved: Machine, half: str) -> None:
    """Its replacement leaves a running region alone, and restores after it."""
    machine = one_reserved
    holder = machine.actor()
    child = bear(machine, holder)
    before = masks(holder.pid, child)
    holder.do("hold")
    old = machine.supervisor()
    os.kill(old[half], signal.SIGKILL)
    wait_until(lambda: machine.supervisor()["worker_pid"] != old["worker_pid"] or half == "pid")
    wait_until(lambda: machine.supervisor()["pid"] != old["pid"] or half == "worker_pid")
    assert all_have([LAST], holder.pid, child)
    holder.do("leave")
    assert masks(holder.pid, child) == before
    holder.do("hold", timeout=LIMIT)
    holder.kill()
    become(OTHERS, child)


@pytest.fixture
def scene(tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[Scene]:
    for machine in reserved(str(LAST), "cgroup2"):
        yield Scene(machine, tmp_path, record_property)


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize(
    "point", ["isolating", "isolated", "held", "leaving", "restoring", "restored"]
)
def test_the_holder_falls_at(scene: Scene, point: str, fault: str) -> None:
    machine = scene.machine
    holder, sibling = scene.actor("holder"), scene.actor("sibling")
    child = bear(machine, holder)
    if point in ("leaving", "restoring", "restored"):
        holder.do("hold", max_hold=1.0)
        scene.arm("holder", point, fault)
        holder.send("leave_anyhow")
    else:
        scene.arm("holder", point, fault)
        holder.send("hold", max_hold=1.0)
    if fault == "kill":
        holder.process.wait(LIMIT)
        become(OTHERS, child)
        os.kill(child, signal.SIGKILL)
        scene.works(sibling)
        return
    scene.wait_for_stop(holder, "holder")
    become(OTHERS, holder.pid, child)
    assert sibling.do("whole", timeout=LIMIT)["verdict"] == "clean"
    holder.signal(signal.SIGCONT)
    holder.answer()
    with contextlib.suppress(ActorError, IndexError):
        holder.do("leave_anyhow")
    become(OTHERS, holder.pid, child)
    scene.works(sibling, holder)


@pytest.mark.parametrize("fault", ["kill", "stop"])
@pytest.mark.parametrize("point", ["restoring", "restored"])
def test_the_worker_falls_while_it_restores(scene: Scene, point: str, fault: str) -> None:
    machine = scene.machine
    holder, sibling = scene.actor("holder"), scene.actor("sibling")
    child = bear(machine, holder)
    holder.do("hold")
    scene.arm("supervisor", point, fault)
    holder.kill()
    wait_until(lambda: scene.has_fallen("supervisor"), "the worker falls")
    become(OTHERS, child)
    os.kill(child, signal.SIGKILL)
    scene.works(sibling)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_the_holder_waits_for_a_worker_that_fell_while_it_restored(
    scene: Scene, fault: str
) -> None:
    """It takes nothing out of the supervisor's hands: another one comes and does it."""
    holder = scene.actor("holder")
    child = bear(scene.machine, holder)
    before = masks(holder.pid, child)
    scene.arm("supervisor", "restoring", fault)
    holder.do("hold", max_hold=0.3)
    wait_until(lambda: scene.has_fallen("supervisor"), "the worker falls")
    assert holder.do("leave_anyhow")["verdict"] == "revoked"
    assert masks(holder.pid, child) == before
    holder.do("hold", timeout=LIMIT)
    assert all_have([LAST], holder.pid, child)
    assert holder.do("leave")["verdict"] == "clean"
    assert masks(holder.pid, child) == before
    scene.works(holder)


# --- everybody else keeps off ---


def test_who_attaches_itself_is_kept_off(reserving: Machine) -> None:
    machine = reserving
    first = machine.actor()
    bare = machine.actor(bare=True)
    bare.call("start_helper")
    bare.do("submit")
    become(OTHERS, bare.pid)
    assert all_have(OTHERS, first.pid)
    assert bare.do("whole")["isolation"] == "affinity"
    assert all_have(OTHERS, bare.pid)


def test_who_helps_himself_is_put_back(reserving: Machine) -> None:
    actor = reserving.actor()
    actor.call("start_helper", cpus=ALL)
    actor.call("choose_cpus", cpus=ALL)
    become(OTHERS, actor.pid)


def test_the_supervisor_keeps_off_too(one_reserved: Machine) -> None:
    one_reserved.actor()
    become(OTHERS, one_reserved.supervisor()["worker_pid"])


def test_two_devices_that_were_told_to_share(one_reserved: Machine) -> None:
    """Both regions run on one CPU then, and both say so, also the one that came first."""
    machine = one_reserved
    first, second = machine.actor(), machine.actor("--device", "cpu:other")
    first.do("hold")
    assert second.do("whole")["verdict"] == "contended"
    report = first.do("leave")
    assert report["verdict"] == "contended"
    assert "same reserved CPUs" in report["reasons"][0]
    for actor in (first, second):
        assert actor.do("whole")["verdict"] == "clean"
    assert all_have(OTHERS, first.pid, second.pid)


def test_a_child_in_a_region_of_its_own(one_reserved: Machine) -> None:
    """Its threads are its parent's region's, so it cannot have them moved."""
    machine = one_reserved
    parent = machine.actor()
    parent.do("hold")
    report = parent.call("a_childs_region_on_another_device")
    assert report["isolation"] == "none"
    assert report["verdict"] == "unknown"
    assert "in the region of" in report["reasons"][0]
    assert all_have([LAST], parent.pid)
    parent.do("leave")
    assert all_have(OTHERS, parent.pid)


def test_a_child_in_a_region_after_its_parents(reserving: Machine) -> None:
    reserving.actor().call("a_childs_region_after_its_parents", inside=[LAST])


def test_a_reservation_that_comes_later_reaches_everybody(machine: Machine) -> None:
    early = machine.actor()
    early.call("start_helper", cpus=[LAST])
    before = masks(early.pid)
    assert mask(early.pid) == ALL
    late = machine.actor("--device", "cpu:late", env={SETTING: str(LAST)})
    assert all_have(OTHERS, late.pid)
    wait_until(lambda: mask(early.pid) == OTHERS, "the first is kept off")
    # One that may run nowhere else stays, and the verdict says so.
    assert sorted(masks(early.pid).values()) == sorted([OTHERS, [LAST]])
    report = late.do("whole")
    assert report["verdict"] == "unknown"
    assert "no other CPUs" in report["reasons"][0]
    # Its own regions are not isolated: nobody reserved anything for its device.
    inside = early.do("whole")
    assert (inside["isolation"], inside["cpus"]) == ("none", None)
    assert machine.krex("recover", "--purge").returncode == 0
    assert masks(early.pid) == before


def test_who_stays_on_another_devices_cpus_is_in_nobodys_way(machine: Machine) -> None:
    other = machine.actor("--device", "cpu:other", env={SETTING: str(LAST)})
    holder = machine.actor("--device", "cpu:own", env={SETTING: str(FIRST)})
    stays = machine.actor()
    stays.call("choose_cpus", cpus=[LAST])
    other.quit()
    wait_until(lambda: holder.do("whole")["verdict"] == "clean")
    time.sleep(1.2)  # By now it was seen that it stays.
    assert holder.do("whole")["verdict"] == "clean"
    again = machine.actor("--device", "cpu:other")
    report = again.do("whole")
    assert "no other CPUs" in report["reasons"][0]
    assert mask(stays.pid) == [LAST]


def test_purge_gives_everybody_the_cpus_back(reserving: Machine) -> None:
    machine = reserving
    holder, sibling = machine.actor(), machine.actor()
    nested = machine.actor("--name", "inner", wrapper=[KREX, "run", "--"])
    sibling.call("start_helper")
    child = bear(machine, holder)
    holder.do("hold")
    assert machine.krex("recover", "--purge").returncode == 0
    become(ALL, holder.pid, sibling.pid, child, nested.pid)
    with contextlib.suppress(ActorError):
        holder.do("leave")
    assert all_have(ALL, holder.pid, child)


def test_what_is_born_while_krex_is_purged_goes_back(one_reserved: Machine) -> None:
    machine = one_reserved
    holder = machine.actor()
    child = bear(machine, holder)
    holder.do("hold")
    assert mask(child) == [LAST]
    purge = threading.Thread(target=machine.krex, args=("recover", "--purge"))
    purge.start()
    wait_until(lambda: mask(child) != [LAST], "the supervisor restores")
    os.sched_setaffinity(child, [LAST])
    purge.join()
    become(ALL, holder.pid, child)


# --- the setting ---


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("abc", "taskset"),
        ("1-", "taskset"),
        ("3-1", "taskset"),
        ("0,,1", "taskset"),
        ("99999", "taskset"),
        ("1023", "no CPU 1023"),
    ],
)
def test_bad_values_are_named(machine: Machine, value: str, words: str) -> None:
    outcome = machine.krex("run", "--", "true", env={SETTING: value})
    assert outcome.returncode == 2
    assert SETTING in outcome.stderr
    assert words in outcome.stderr
    bare = machine.actor(bare=True, env={SETTING: value})
    for _ in range(2):
        with pytest.raises(ActorError, match=SETTING) as caught:
            bare.do("enter")
        assert caught.value.kind == "ValueError"
        assert words in caught.value.message
        assert machine.device()["phase"] == "open"
    # It is in nobody's way: the next one has its region.
    assert machine.actor().do("whole")["verdict"] == "clean"


def test_cpus_outside_of_the_cpuset_are_refused(machine: Machine) -> None:
    cpusets = Path("/sys/fs/cgroup/cpuset")
    if not (cpusets / "cpuset.cpus").exists():
        pytest.skip("no cpuset of version 1 to try it with")
    group = cpusets / f"krex-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpuset.cpus").write_text(str(FIRST))
        (group / "cpuset.mems").write_text((cpusets / "cpuset.mems").read_text())
        machine.actor()  # Its supervisor is not confined.
        bare = machine.actor(bare=True, env={SETTING: str(LAST)})
        (group / "cgroup.procs").write_text(str(bare.pid))
        with pytest.raises(ActorError, match=f"may not use CPU {LAST}"):
            bare.do("enter")
        # Others may: then it says that it could not go there.
        machine.actor(env={SETTING: str(LAST)})
        confined = machine.actor(bare=True, env={SETTING: str(LAST)})
        assert confined.do("whole")["verdict"] == "clean"
        (group / "cgroup.procs").write_text(str(confined.pid))
        report = confined.do("whole")
        assert report["verdict"] == "unknown"
        assert report["isolation"] == "none"
        assert "not moved" in report["reasons"][0]
        assert all_have([FIRST], confined.pid)
        for actor in (bare, confined):
            actor.kill()
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "it is empty")
        group.rmdir()


@pytest.mark.parametrize("value", ["", "none", " none "])
def test_none_can_be_asked_for(machine: Machine, value: str) -> None:
    actor = machine.actor(env={SETTING: value})
    assert mask(actor.pid) == ALL
    report = actor.do("whole")
    assert (report["isolation"], report["cpus"], report["verdict"]) == ("none", None, "clean")
    outcome = machine.krex("run", "--", "true", env={SETTING: str(LAST)})
    assert outcome.returncode == 2
    assert "none" in outcome.stderr


def test_two_settings_do_not_mix(one_reserved: Machine) -> None:
    machine = one_reserved
    first = machine.actor()
    outcome = machine.krex("run", "--", "true", env={SETTING: str(FIRST)})
    assert outcome.returncode == 2
    for words in (SETTING, str(FIRST), str(LAST), "same setting"):
        assert words in outcome.stderr
    bare = machine.actor(bare=True, env={SETTING: str(FIRST)})
    with pytest.raises(ActorError, match="same setting") as caught:
        bare.do("enter")
    assert caught.value.kind == "ValueError"
    # Without a setting of its own a command takes what there is.
    plain = {name: it for name, it in machine.environment.items() if name != SETTING}
    machine.environment = plain
    unset = machine.actor()
    assert unset.do("whole")["cpus"] == str(LAST)
    bare.quit()
    first.quit()
    unset.quit()
    # The last one gone, the next decides anew.
    wait_until(lambda: not machine.supervisor_processes(), "the pair ends")
    assert machine.device()["cpus"] is None
    other = machine.actor(env={SETTING: str(FIRST)})
    assert other.do("whole")["cpus"] == str(FIRST)


def test_status_shows_what_is_reserved(one_reserved: Machine) -> None:
    machine = one_reserved
    machine.actor()
    lines = machine.krex("status").stdout.splitlines()
    head = next(it for it in lines if it.startswith("DEVICE"))
    row = lines[lines.index(head) + 1]
    assert row[head.index("CPUS") :].split()[0] == str(LAST)
    assert is_running(machine.supervisor()["pid"])
    assert process_state(machine.supervisor()["worker_pid"]) is not None
