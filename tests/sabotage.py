"""Break each step and each invariant, one at a time: at least one test must notice.

`make test-sabotage`. Test builds have a switch for each (`sabotaged("…")` in rust/), set through
KREX_SABOTAGE. The tests named here are the cheapest that should fail then; that they pass with
everything intact is shown first, under the same limits.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent
RUST = TESTS.parent / "rust"

# What a sabotaged test waits at most for anything, and all in all, in seconds.
WAIT_LIMIT = 10
TEST_LIMIT = 60
RUN_LIMIT = 180

# The variable by which everything that a run started is found again, supervisors included: they
# inherit what begins with KREX_.
MARK = "KREX_TEST_RUN"


@dataclass(frozen=True)
class Sabotage:
    switch: str
    breaks: str
    """The step, or the invariant, of which the switch takes something away."""
    effect: str
    tests: tuple[str, ...]


def falls(point: str, victim: str, fault: str, freezer: str = "cgroup2") -> str:
    return (
        f"test_faults.py::test_one_falls_while_the_holder_is_at[{freezer}-{point}-{victim}-{fault}]"
    )


FROZEN_AND_THAWED = "test_region.py::test_siblings_are_frozen_and_thawed[cgroup2]"
CHILD_DIES = "test_faults.py::test_a_child_of_a_sibling_dies_with_a_submission_in_flight"
IN_FLIGHT = (CHILD_DIES, "test_gate.py::test_what_is_in_flight_is_waited_for[cgroup2]")

TABLE = (
    # The steps.
    Sabotage(
        "exclusive",
        "step 1, I1",
        "a closed gate is granted, too",
        ("test_gate.py::test_a_gate_between_processes",),
    ),
    Sabotage(
        "close",
        "step 2",
        "the gate does not go on to closing",
        (FROZEN_AND_THAWED,),
    ),
    Sabotage(
        "turn_back",
        "step 3, I2",
        "submissions pass a closed gate",
        (
            "test_gate.py::test_a_submission_waits_for_the_gate",
            "test_gate.py::test_a_gate_between_processes",
        ),
    ),
    Sabotage(
        "admission",
        "step 3, I2",
        "`krex run` starts its command while a region runs",
        ("test_faults.py::test_a_command_waits_for_a_region_that_comes",),
    ),
    Sabotage(
        "await",
        "steps 3 to 5",
        "the holder does not wait for its siblings",
        IN_FLIGHT,
    ),
    Sabotage("drain", "step 4, I2", "what is in flight is not waited for", IN_FLIGHT),
    Sabotage("count", "step 4, I2", "nothing ever seems in flight", IN_FLIGHT),
    Sabotage(
        "drain_streams",
        "step 4",
        "what siblings have left on their streams is not waited for",
        ("test_interposer.py::test_streams_are_drained_before_the_region",),
    ),
    Sabotage(
        "captures",
        "step 4, I8",
        "the drain takes no notice of captures",
        ("test_interposer.py::test_captures_survive_a_drain[blocking-global]",),
    ),
    Sabotage(
        "exchange",
        "step 3, I2",
        "cuGetProcAddress hands out the driver's own functions",
        ("test_interposer.py::test_what_the_driver_hands_out_is_exchanged",),
    ),
    Sabotage(
        "drain_own",
        "step 7",
        "the region ends before its own work",
        ("test_interposer.py::test_the_regions_own_work_belongs_to_it",),
    ),
    Sabotage("freeze", "step 5", "nobody is frozen", (FROZEN_AND_THAWED,)),
    Sabotage(
        "verify",
        "step 8",
        "nobody looks whether the frozen stayed so",
        ("test_faults.py::test_an_outsiders_continue_shows_in_the_verdict[cgroup2]",),
    ),
    Sabotage(
        "spare_holder",
        "step 5",
        "a holder is frozen for a region on another device",
        ("test_tenants.py::test_a_holder_is_not_frozen_by_a_claim_on_another_device[cgroup2]",),
    ),
    Sabotage(
        "spare_ancestors",
        "step 5",
        "ancestors of the holder are frozen",
        ("test_run.py::test_krex_run_inside_krex_run",),
    ),
    Sabotage(
        "isolate",
        "step 6",
        "the holder stays where it is",
        ("test_isolation.py::test_the_holder_has_the_reserved_cpu_to_itself[cgroup2]",),
    ),
    Sabotage(
        "keep_off",
        "step 6",
        "others run on reserved CPUs, too",
        ("test_isolation.py::test_who_helps_himself_is_put_back[cgroup2]",),
    ),
    Sabotage(
        "restore",
        "step 8, I8",
        "the holder's threads stay on reserved CPUs",
        (
            "test_isolation.py::test_the_calling_thread_has_a_cpu_of_its_own",
            "test_isolation.py::test_a_killed_holder_leaves_no_child_behind[cgroup2]",
        ),
    ),
    Sabotage(
        "settle",
        "step 8, I8",
        "what was being born at the end stays on reserved CPUs",
        ("test_isolation.py::test_what_appears_after_the_end_goes_back[cgroup2]",),
    ),
    Sabotage("hold", "step 7, I1", "the region is open from its beginning", (FROZEN_AND_THAWED,)),
    Sabotage(
        "revoke_late",
        "step 7, I3",
        "`max_hold` ends nothing",
        ("test_region.py::test_past_max_hold_everybody_is_released[cgroup2]",),
    ),
    Sabotage(
        "stall_breaker",
        "step 7, I3",
        "siblings stay frozen that the holder waits for",
        ("test_tenants.py::test_a_lock_held_by_a_frozen_sibling_is_waited_for",),
    ),
    Sabotage("open_gate", "step 8", "the holder leaves the gate closed", (FROZEN_AND_THAWED,)),
    Sabotage("thaw", "step 8, I3", "nobody is thawed", (FROZEN_AND_THAWED,)),
    # The invariants.
    Sabotage(
        "revoke_dead", "I3", "a dead holder keeps its region", (falls("held", "holder", "kill"),)
    ),
    Sabotage(
        "take_over",
        "I3",
        "a keeper does not thaw what its worker froze",
        ("test_faults.py::test_a_worker_falls_while[cgroup2-thawing-kill]",),
    ),
    Sabotage(
        "replace_worker",
        "I3",
        "a stopped worker is left alone",
        ("test_faults.py::test_a_worker_falls_while[cgroup2-thawing-stop]",),
    ),
    Sabotage(
        "replace_keeper",
        "I3",
        "a stopped keeper is left alone",
        (falls("held", "keeper", "stop"),),
    ),
    Sabotage("revive", "I3", "a dead pair stays dead", (falls("frozen", "pair", "kill"),)),
    Sabotage(
        "wake",
        "I4",
        "an opening gate wakes nobody, and sleepers don't look by themselves",
        (falls("granted", "holder", "kill"),),
    ),
    Sabotage(
        "queue_order",
        "I5",
        "whoever comes last has the next turn",
        ("test_faults.py::test_turns_are_taken_in_the_order_of_the_queue",),
    ),
    Sabotage(
        "hand_over",
        "step 8",
        "the gate opens for a moment between two regions",
        ("test_hand_over.py::test_the_next_holder_follows_under_the_closed_gate[cgroup2]",),
    ),
    Sabotage(
        "budget",
        "I5",
        "regions that follow one another starve everybody else",
        (
            "test_hand_over.py::test_a_spent_budget_opens_the_gate_for_a_quarter_of_the_run[cgroup2]",
        ),
    ),
    Sabotage(
        "epoch",
        "I6",
        "a revoked holder opens its successor's gate",
        (falls("frozen", "holder", "stop", freezer="sigstop"),),
    ),
    Sabotage(
        "free_slots",
        "I7",
        "slots of the dead are not given back",
        ("test_faults.py::test_a_command_falls_before_it_starts[cgroup2-admitted-kill]",),
    ),
    Sabotage(
        "free_submitters",
        "I7",
        "what the dead had in flight is waited for",
        (CHILD_DIES,),
    ),
    Sabotage(
        "exec",
        "I8",
        "`krex run` stays in between",
        ("test_run.py::test_no_process_stays_in_between",),
    ),
    Sabotage(
        "sigpipe",
        "I8",
        "the command ignores SIGPIPE",
        ("test_run.py::test_dispositions_are_inherited[SIG_DFL]",),
    ),
)

STEPS = {1, 2, 3, 4, 5, 6, 7, 8}
INVARIANTS = {f"I{number}" for number in range(1, 9)}


@dataclass(frozen=True)
class Outcome:
    status: int
    """pytest's: 0 all passed, 1 some failed, else it could not run them."""
    output: str
    seconds: float


def run_tests(tests: list[str], switch: str | None) -> Outcome:
    """Run tests in a process group of their own; nothing of theirs is left afterwards."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "KREX_TEST_LIMIT": str(WAIT_LIMIT)}
    for name in ("KREX_SABOTAGE", "KREX_FAULT", "KREX_RUNTIME_DIR"):
        environment.pop(name, None)
    if switch is not None:
        environment["KREX_SABOTAGE"] = switch
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"]
    command += [f"--timeout={TEST_LIMIT}", *(["--exitfirst"] if switch else []), *tests]
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=TESTS,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=RUN_LIMIT if switch else RUN_LIMIT * 4)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, status = f"ended after {RUN_LIMIT} s", 1
    finally:
        clean_up(mark)
        process.kill()
        process.wait()
    return Outcome(status, output, time.monotonic() - started)


def clean_up(mark: str) -> None:
    """Kill what carries the mark, and purge the runtime directories that it used."""
    directories = set()
    while left := marked(mark):
        for pid, environment in left.items():
            directories.add(environment.get("KREX_RUNTIME_DIR"))
            for number in (signal.SIGKILL, signal.SIGCONT):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    break
        time.sleep(0.02)
    for directory in directories - {None}:
        subprocess.run(
            [sys.executable, "-m", "krex", "recover", "--purge"],
            env={**os.environ, "KREX_RUNTIME_DIR": str(directory)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=RUN_LIMIT,
            check=False,
        )


def marked(mark: str) -> dict[int, dict[str, str]]:
    """The processes that carry the mark, with their environments."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            pairs = (entry / "environ").read_text(errors="replace").split("\0")
        except OSError:
            continue
        environment = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if environment.get(MARK) == mark:
            found[int(entry.name)] = environment
    return found


def switches_of_the_source() -> set[str]:
    text = "".join(path.read_text() for path in RUST.rglob("*.rs"))
    return set(re.findall(r'sabotaged\("(\w+)"\)', text))


def gaps() -> list[str]:
    """What the table should have and has not."""
    known = {it.switch for it in TABLE}
    source = switches_of_the_source()
    found = [f"switch {it}: not in the table" for it in sorted(source - known)]
    found += [f"switch {it}: not in rust/" for it in sorted(known - source)]
    broken = " ".join(it.breaks for it in TABLE)
    steps = set(map(int, re.findall(r"\b(\d)\b", broken)))
    found += [f"step {it}: no switch" for it in sorted(STEPS - steps)]
    found += [f"{it}: no switch" for it in sorted(INVARIANTS - set(re.findall(r"I\d", broken)))]
    return found


def first_failure(output: str) -> str:
    lines = [it for it in output.splitlines() if re.match(r"(FAILED|ERROR|E )", it)]
    return lines[0] if lines else output.strip().rpartition("\n")[2]


def main() -> int:
    wanted = set(sys.argv[1:])
    table = [it for it in TABLE if not wanted or it.switch in wanted]
    problems = gaps()
    tests = list(dict.fromkeys(test for it in table for test in it.tests))
    intact = run_tests(tests, None)
    print(f"intact: {len(tests)} tests in {intact.seconds:.0f} s", flush=True)
    if intact.status != 0:
        print(intact.output)
        problems.append("the tests fail with everything intact")
    width = max(len(it.switch) for it in table)
    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = pool.map(lambda it: run_tests(list(it.tests), it.switch), table)
        for it, outcome in zip(table, outcomes, strict=True):
            verdict = {0: "UNNOTICED", 1: "noticed"}.get(outcome.status, "NOT RUN")
            print(
                f"{it.switch:{width}}  {it.breaks:12}  {verdict:9}  {outcome.seconds:4.0f} s  "
                f"{it.effect}",
                flush=True,
            )
            if outcome.status == 1:
                print(f"{'':{width}}  by {first_failure(outcome.output)}", flush=True)
            else:
                problems.append(f"switch {it.switch}: {verdict}")
                if outcome.status != 0:
                    print(outcome.output)
    for problem in problems:
        print(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
