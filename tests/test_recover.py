"""`krex recover`: what nobody is left to repair, and taking krex out of use."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from harness import KREX, LIMIT, Actor, ActorError, Machine, is_frozen, wait_until

# Where the header, which never changes, ends (rust/krex-core/src/layout.rs).
HEADER = 4096


def recover(machine: Machine, *options: str) -> str:
    """Run `krex recover`, which must succeed; returns what it says that it did."""
    outcome = machine.krex("recover", *options)
    assert outcome.returncode == 0, outcome
    assert outcome.stderr == ""
    return outcome.stdout


def works(*actors: Actor) -> None:
    """Everybody can have a region, and submit."""
    for actor in actors:
        actor.do("enter", timeout=LIMIT)
        actor.do("spin", seconds=0.02)
        assert actor.do("leave")["verdict"] in ("clean", "contended")
    for actor in actors:
        actor.do("submit", timeout=LIMIT)


def held_with_sibling(machine: Machine) -> tuple[Actor, Actor]:
    """A holder in its region, and a sibling that is frozen."""
    holder, sibling = machine.actor("--name", "the holder"), machine.actor("--name", "the sibling")
    sibling.do("submit")
    sibling.send("spin", seconds=0.1)
    holder.do("hold")
    return holder, sibling


def segment(machine: Machine) -> Path:
    return machine.runtime_dir / "segment"


def nothing_is_left(machine: Machine) -> None:
    assert not machine.runtime_dir.exists()
    assert machine.own_groups() == []


# --- by hand, what supervisors do otherwise ---


def test_everybody_dead_but_a_frozen_sibling(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling = held_with_sibling(machine)
    machine.kill_supervisor()
    holder.kill()
    assert is_frozen(sibling.pid)
    done = recover(machine)
    assert "thawed the sibling" in done
    assert "opened the gate of cpu, held by the holder" in done
    assert f"freed the slot of the holder ({holder.pid})" in done
    assert "started the supervisor of 1 running tenants again" in done
    wait_until(machine.nobody_is_frozen)
    assert sibling.answer() > 0
    assert list(machine.tenants()) == [sibling.pid]
    works(sibling, machine.actor())


def test_everybody_dead(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling = held_with_sibling(machine)
    machine.kill_supervisor()
    holder.kill()
    sibling.kill()
    recover(machine)
    assert machine.tenants() == {}
    assert machine.device()["phase"] == "open"
    assert machine.own_groups() == []
    assert recover(machine) == "nothing to recover\n"
    works(machine.actor())


def test_a_region_that_runs_is_left_alone(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling = held_with_sibling(machine)
    assert recover(machine) == "nothing to recover\n"
    assert is_frozen(sibling.pid)
    assert holder.do("leave")["verdict"] == "clean"
    assert sibling.answer() > 0


def test_a_region_past_its_limit(machine: Machine) -> None:
    """Its supervisor, which would end it, is stopped as a whole: as in a frozen container."""
    holder = machine.actor()
    holder.do("enter", max_hold=0.1)
    machine.stop_supervisor()
    # Repeated, since the pair may be at taking over from its own stopped half just then.
    wait_until(lambda: recover(machine) and machine.device()["phase"] == "open")
    with pytest.raises(ActorError, match="max_hold") as caught:
        holder.do("leave")
    assert caught.value.kind == "RegionRevoked"
    works(holder, machine.actor())


def test_the_segment_was_removed_by_hand(machine: Machine) -> None:
    machine.freezer = machine.environment["KREX_FREEZER"] = "cgroup2"
    holder, sibling = held_with_sibling(machine)
    machine.kill_supervisor()
    segment(machine).unlink()
    holder.kill()
    assert is_frozen(sibling.pid)
    assert recover(machine).count("removed the cgroup krex-") == 2
    assert machine.own_groups() == []
    assert sibling.answer() > 0


def test_without_anything(machine: Machine) -> None:
    assert recover(machine) == "nothing to recover\n"
    machine.runtime_dir.rmdir()
    assert recover(machine) == "nothing to recover\n"
    assert recover(machine, "--purge") == "nothing to recover\n"
    nothing_is_left(machine)


# --- out of use ---


def test_purge_while_tenants_live(freezing_machine: Machine) -> None:
    machine = freezing_machine
    holder, sibling = held_with_sibling(machine)
    late = machine.actor(bare=True)  # not attached yet
    done = recover(machine, "--purge")
    assert "ended the region on cpu" in done
    assert f"removed {segment(machine)}" in done
    assert f"removed {machine.runtime_dir}" in done
    nothing_is_left(machine)
    wait_until(lambda: not machine.supervisor_processes(), "the pair ends")
    assert sibling.answer() > 0, "it goes on"
    with pytest.raises(ActorError, match="krex recover") as caught:
        holder.do("leave")
    assert caught.value.kind == "RegionRevoked"
    # Everybody attaches anew.
    works(holder, sibling, late)
    assert set(machine.tenants()) == {holder.pid, sibling.pid, late.pid}
    sibling.send("spin", seconds=0.05)
    holder.do("enter")
    assert is_frozen(sibling.pid)
    assert is_frozen(late.pid)
    holder.do("leave")


def test_purge_while_others_wait(machine: Machine) -> None:
    """One in the queue is told; one at the gate goes on."""
    # On a device of their own, so that the regions below don't concern them.
    holder, submitter = (machine.actor("--device", "cpu:other") for _ in range(2))
    claim = "entered.append(krex.SharedMemoryGate('own')); value = entered[-1].try_claim()"
    assert holder.do("run", code=claim) == 1
    submitter.send("run", code="krex.InFlightCounter('own').enter()")
    wait_until(lambda: machine.tenants()[submitter.pid]["waiting"], "it waits at the gate")
    closer, queuer = machine.actor(), machine.actor()
    queuer.do("begin_submission")
    closer.send("enter", drain_timeout=LIMIT)
    wait_until(lambda: machine.device()["phase"] == "closing", "it waits for the submission")
    queuer.send("enter")
    wait_until(lambda: machine.device()["queue"], "it queues")
    assert "ended the region on cpu" in recover(machine, "--purge")
    assert submitter.answer() is None, "it goes on"
    for actor, kind in ((queuer, "SegmentError"), (closer, "RegionRevoked")):
        with pytest.raises(ActorError, match=r"purged|krex recover") as caught:
            actor.answer()
        assert caught.value.kind == kind
    works(closer, queuer)


def test_purge_kills_a_supervisor_that_does_not_end(freezing_machine: Machine) -> None:
    machine = freezing_machine
    _, sibling = held_with_sibling(machine)
    machine.stop_supervisor()
    done = recover(machine, "--purge")
    assert "killed a supervisor that did not end" in done
    assert "thawed the sibling" in done
    wait_until(lambda: not machine.supervisor_processes(), "the pair ends")
    assert sibling.answer() > 0
    nothing_is_left(machine)
    works(sibling)


def test_purge_leaves_what_is_not_krexs(machine: Machine) -> None:
    machine.actor().quit()
    note = machine.runtime_dir / "note"
    note.write_text("mine")
    assert f"removed {machine.runtime_dir}\n" not in recover(machine, "--purge")
    assert [it.name for it in machine.runtime_dir.iterdir()] == ["note"]


# --- damaged ---


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


DAMAGES = {
    "magic": (lambda path: overwrite(path, 0, b"NOTKREX!"), "magic"),
    "size": (lambda path: overwrite(path, 16, bytes(8)), "size"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "size"),
    "empty": (lambda path: os.truncate(path, 0), "too short"),
    "text": (lambda path: path.write_text("hello\n" * 1000), "magic"),
    "mode": (lambda path: path.chmod(0o666), "chmod 0600"),
    "link": (lambda path: [path.unlink(), path.symlink_to("/dev/null")], "segment"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_segment(machine: Machine, damage: str) -> None:
    machine.actor().quit()
    machine.kill_supervisor()
    break_it, problem = DAMAGES[damage]
    break_it(segment(machine))
    for words in (["status"], ["run", "--", "true"], ["recover"]):
        outcome = machine.krex(*words)
        assert outcome.returncode == 125, outcome
        assert outcome.stderr.startswith("krex: ")
        assert outcome.stderr.count("\n") == 1
        assert problem in outcome.stderr
        assert "Remove it" in outcome.stderr or "chmod" in outcome.stderr
    done = recover(machine, "--purge")
    assert f"removed {segment(machine)}" in done
    nothing_is_left(machine)
    works(machine.actor())


def test_a_directory_in_its_place(machine: Machine) -> None:
    """It could be anything of the user's, so that not even `--purge` takes it away."""
    segment(machine).mkdir()
    for words in (["status"], ["run", "--", "true"], ["recover"], ["recover", "--purge"]):
        outcome = machine.krex(*words)
        assert outcome.returncode == 125, outcome
        assert f"Remove it: `rm -r {segment(machine)}`" in outcome.stderr
    segment(machine).rmdir()
    works(machine.actor())


def test_damaged_under_live_tenants(machine: Machine) -> None:
    """Nobody can be told of the purge; they go on all the same, and new ones start afresh."""
    machine.freezer = machine.environment["KREX_FREEZER"] = "cgroup2"
    holder, sibling = held_with_sibling(machine)
    overwrite(segment(machine), 0, b"NOTKREX!")
    assert machine.krex("status").returncode == 125
    done = recover(machine, "--purge")
    assert "found a damaged segment" in done
    nothing_is_left(machine)
    assert sibling.answer() > 0
    holder.do("leave_anyhow")
    works(machine.actor(), machine.actor())
    sibling.do("submit", timeout=LIMIT)
    holder.do("ping")


def test_another_layout(machine: Machine) -> None:
    """Named while it is used, replaced when it is not."""
    actor = machine.actor()
    actor.do("submit")
    overwrite(segment(machine), 8, (999).to_bytes(8, "little"))
    outcome = machine.krex("run", "--", "true")
    assert outcome.returncode == 125
    for part in ("layout 999", str(actor.pid), "KREX_RUNTIME_DIR"):
        assert part in outcome.stderr
    machine.kill_supervisor()
    actor.kill()
    assert machine.krex("run", "--", "true").returncode == 0


def corrupt(path: Path, source: random.Random, how: str) -> None:
    """Change everything behind the header, or some of it."""
    content = path.read_bytes()
    if how == "everywhere":
        overwrite(path, HEADER, source.randbytes(len(content) - HEADER))
        return
    if how == "here and there":
        for _ in range(2000):
            offset = source.randrange(HEADER, len(content) - 8)
            overwrite(path, offset, source.randbytes(source.choice((1, 8))))
        return
    for offset in range(HEADER, len(content), 8):
        word = int.from_bytes(content[offset : offset + 8], "little")
        if word and source.random() < 0.2:
            flipped = word ^ 1 << source.randrange(64)
            overwrite(path, offset, flipped.to_bytes(8, "little"))


@pytest.mark.parametrize("how", ["everywhere", "here and there", "single bits in use"])
@pytest.mark.parametrize("seed", range(2))
def test_random_bytes_crash_nobody(machine: Machine, seed: int, how: str) -> None:
    """Whoever looks at a segment full of garbage ends by itself, and not by a signal."""
    actors = [machine.actor(bare=bare) for bare in (False, False, True)]
    for actor in actors:
        actor.do("submit")
    corrupt(segment(machine), random.Random(seed), how)
    for words in (["status"], ["status", "--json"], ["doctor"]):
        outcome = machine.krex(*words)
        assert outcome.returncode in (0, 1, 125), outcome
        assert "panicked" not in outcome.stderr
    code = (
        "import krex\n"
        "try:\n"
        "    with krex.submission(timeout=0.3): pass\n"
        "    with krex.region.critical(timeout=0.3, max_hold=1, drain_timeout=0.1): pass\n"
        "except (krex.KrexError, ValueError): pass\n"
    )
    bare = machine.run([sys.executable, "-c", code])
    assert bare.returncode == 0, bare
    assert "panicked" not in bare.stderr
    # Under `krex run` it may wait for a region that never was: until the purge.
    launched = machine.start(
        [KREX, "run", "--", sys.executable, "-c", code], stderr=subprocess.PIPE, text=True
    )
    for actor in actors:
        actor.send("enter", timeout=0.3, max_hold=1.0, drain_timeout=0.1)
    for actor in actors:
        # One of krex's errors, or none; ended by a signal would be an EOFError.
        outcome = actor.poll_answer(LIMIT)
        assert outcome is not None
        assert outcome.get("error", "RegionError") in (
            "RegionError",
            "RegionTimeout",
            "RegionRevoked",
            "SegmentError",
            "KrexError",
        ), outcome
    outcome = machine.krex("recover", "--purge")
    assert outcome.returncode == 0, outcome
    _, errors = launched.communicate(timeout=LIMIT)
    assert launched.returncode in (0, 125), errors
    assert "panicked" not in errors
    recover(machine, "--purge")  # It may have gone on in a new segment.
    nothing_is_left(machine)
    works(machine.actor())
