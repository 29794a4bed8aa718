"""What krex promises, in plain Python: who may hold, submit, run and wait, judged from outside.

The model does not predict who wins a race. It follows what processes were told, what they
answered and what the segment shows, and says of each whether it was allowed (a `ViolationError` if
not), and what still has to happen before everything is at rest (`Model.unmet`).

The invariants I1 to I8 are those of the design: one holder (I1), no submission of a sibling in a
region (I2), nobody frozen for longer than needed (I3), no lost wake-up (I4), order of the queue
(I5), a revoked holder is fenced off (I6), the dead hold nobody up (I7), exit codes and results as
without krex (I8).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

DEFAULT = "cpu"
# How long the gate stays reserved for each waiter ahead.
TURN = 0.2
GRANTED = ("granted", "handed_over")
# One level of priority is worth so much waiting.
AGEING = 10.0
# A holder that burns CPU time at least this often cannot have been taken for stalled.
STARVED = 0.1

CLAIM = "hold"
SUBMISSIONS = ("submit", "begin_submission")


class ViolationError(AssertionError):
    """krex did what it must not."""


@dataclass(eq=False)
class Operation:
    """Something that a process was told to do, and has not answered yet."""

    word: str
    sent: float
    device: str = DEFAULT
    timeout: float | None = None
    priority: int = 0
    max_hold: float = 60.0
    drain_timeout: float = 0.5
    detail: Any = None
    # Who was there when a claim was sent: to be frozen, and in flight.
    siblings: list[Process] = field(default_factory=list)
    flights: list[tuple[Process, Flight]] = field(default_factory=list)
    # The process was stopped meanwhile: its turn may have been taken away.
    was_stopped: bool = False
    # It may have let a turn pass, or a grant: nobody waits for it again.
    may_be_absent: bool = False

    def is_late(self, now: float) -> bool:
        return self.timeout is not None and now > self.sent + self.timeout


@dataclass(eq=False)
class Flight:
    """A submission that was begun and not ended."""

    device: str
    # A holder has waited for it in vain: later ones look once.
    is_stuck: bool = False


@dataclass(eq=False)
class Blemish:
    """Why a verdict cannot be clean, and on whose account."""

    text: str
    culprit: Process

    def __str__(self) -> str:
        return f"{self.culprit} {self.text}"


@dataclass(eq=False)
class Region:
    process: Process
    device: str
    epoch: int
    joined: bool
    # When it was told to, when it began to, and when it was in.
    sent: float
    asked: float
    entered: float
    max_hold: float
    siblings: list[Process]
    flights: list[tuple[Process, Flight]]
    tenants: set[int]
    # It was certainly held until then.
    held_until: float
    is_ending: bool = False
    is_over: bool = False
    is_revoked: bool = False
    was_stopped: bool = False
    # Why the verdict cannot be clean.
    blemishes: list[Blemish] = field(default_factory=list)

    def is_active(self) -> bool:
        return not (self.is_ending or self.is_over or self.is_revoked)

    def __str__(self) -> str:
        return f"region {self.epoch} of {self.process} on {self.device}"


@dataclass(eq=False)
class Process:
    pid: int
    kind: str  # "run", "bare" or "child"
    name: str | None
    devices: set[str]
    parent: Process | None = None
    freezer: str = "cgroup2"
    is_alive: bool = True
    is_stopped: bool = False
    # It was stopped while the SIGSTOP freezer may have stopped it, too: whose stop it is, and
    # who ends it, cannot be told apart.
    is_fuzzy: bool = False
    may_have_left_a_child: bool = False
    operation: Operation | None = None
    regions: list[Region] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)
    # Per device: until when it had anything in flight.
    flew_until: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} {self.pid}"

    def descends_from(self, other: Process) -> bool:
        return self.parent is other


@dataclass(eq=False)
class View:
    """What the segment showed at one moment."""

    at: float
    devices: dict[str, dict[str, Any]]
    tenants: dict[int, dict[str, Any]]

    @classmethod
    def of(cls, snapshot: dict[str, Any], at: float) -> View:
        return cls(
            at,
            {it["name"]: it for it in snapshot["devices"]},
            {it["pid"]: it for it in snapshot["tenants"]},
        )

    def is_open(self, device: str) -> bool:
        return device not in self.devices or self.devices[device]["phase"] == "open"

    def closed(self) -> list[str]:
        return [name for name in self.devices if not self.is_open(name)]

    def epoch(self, device: str) -> int:
        return int(self.devices[device]["epoch"]) if device in self.devices else 0

    def pid_of(self, name: str | None) -> int | None:
        return next((pid for pid, it in self.tenants.items() if it["name"] == name), None)


@dataclass(eq=False)
class Submission:
    process: Process
    family: tuple[Process, ...]
    device: str
    began: float
    admitted: float


class Model:
    def __init__(self, is_starved: Callable[[Process], bool]) -> None:
        self.is_starved = is_starved
        self.processes: list[Process] = []
        self.current: dict[str, Region] = {}
        self.regions: list[Region] = []
        self.submissions: list[Submission] = []
        # Per device and epoch: the last view in which the gate was closed.
        self.closed_views: dict[str, dict[int, View]] = {}
        self.epochs: dict[str, int] = {}
        # Per tenant: what was said, and from when to when.
        self.said: dict[Process, list[tuple[float, float, str]]] = {}
        self.decisions = 0

    # --- who is who ---

    def alive(self) -> list[Process]:
        return [it for it in self.processes if it.is_alive]

    def unit(self, process: Process, view: View) -> Process | None:
        """The root of the tenant that a process belongs to."""
        if process.pid in view.tenants:
            return process
        if process.parent is not None and process.parent.pid in view.tenants:
            return process.parent
        return None

    def devices(self, process: Process, view: View) -> set[str]:
        unit = self.unit(process, view)
        shared = set(view.tenants[unit.pid]["devices"]) if unit else set()
        return shared | process.devices

    def holder(self, device: str, view: View) -> Process | None:
        if view.is_open(device):
            return None
        pid = view.pid_of(view.devices[device]["holder"])
        return next((it for it in self.processes if it.pid == pid), None)

    def passes(self, process: Process, holder: Process | None, view: View) -> bool:
        """Whether the process belongs to the holder, or descends from it."""
        unit = self.unit(process, view) or process
        return holder is not None and (unit is holder or unit.descends_from(holder))

    def may_be_frozen(self, process: Process, view: View) -> bool:
        unit = self.unit(process, view) or process
        closed = view.closed()
        for device in closed:
            # Who was granted the turn and has not begun is frozen for a region on another device.
            is_granted = view.devices[device]["phase"] in GRANTED
            if self.holder(device, view) is unit and not is_granted:
                return False
        for device in closed:
            holder = self.holder(device, view)
            if view.devices[device]["phase"] == "granted" or holder is unit:
                continue
            if device not in self.devices(process, view) or self.passes(process, holder, view):
                continue
            if holder is not None and holder.descends_from(process):
                continue  # An ancestor of the holder runs on.
            return True
        return False

    def can_run(self, process: Process, view: View) -> bool:
        """Whether it certainly runs, or could."""
        return (
            process.is_alive
            and not process.is_stopped
            and not process.is_fuzzy
            and not self.may_be_frozen(process, view)
        )

    # --- what happens ---

    def send(self, process: Process, operation: Operation, view: View) -> None:
        assert process.operation is None
        process.operation = operation
        device = operation.device
        if operation.word == CLAIM and not process.regions:
            for pid, tenant in view.tenants.items():
                sibling = next((it for it in self.processes if it.pid == pid), None)
                if sibling is None or not sibling.is_alive or device not in tenant["devices"]:
                    continue
                family = sibling is process or sibling.descends_from(process)
                if not family and not process.descends_from(sibling):
                    operation.siblings.append(sibling)
            operation.flights = [
                (it, flight)
                for it in self.alive()
                if it is not process and not it.descends_from(process)
                for flight in it.flights
                if flight.device == device
            ]
        elif operation.word in ("leave", "leave_code"):
            leaves_all = operation.word == "leave_code"
            for region in process.regions if leaves_all else process.regions[-1:]:
                region.is_ending = True
        if operation.word in ("end_submission", "leave_code"):
            ends_all = operation.word == "leave_code"
            del process.flights[0 if ends_all else -1 :]

    def answer(self, process: Process, outcome: dict[str, Any], view: View) -> None:
        operation = process.operation
        if operation is None:
            raise ViolationError(f"I8: {process} answers without being asked: {outcome}")
        process.operation = None
        if operation.word in SUBMISSIONS or operation.word == "end_submission":
            process.flew_until[operation.device] = outcome["at"][1]
        handler = getattr(self, f"_answered_{operation.word}", None)
        error = outcome.get("error")
        if error == "RegionTimeout":
            self._timed_out(process, operation, outcome)
        elif handler is not None:
            handler(process, operation, outcome, view)
        elif error is not None:
            raise ViolationError(f"{process} cannot {operation.word}: {outcome}")
        self.check_submissions()

    def _timed_out(self, process: Process, operation: Operation, outcome: dict[str, Any]) -> None:
        began, ended = outcome["at"]
        if operation.timeout is None or ended - began < operation.timeout - 0.001:
            raise ViolationError(f"{process} timed out too early: {operation}, {outcome}")

    def _answered_hold(
        self, process: Process, operation: Operation, outcome: dict[str, Any], view: View
    ) -> None:
        if "error" in outcome:
            if outcome["error"] == "RegionRevoked" and operation.was_stopped:
                return
            raise ViolationError(f"{process} cannot enter: {outcome}")
        began, entered = outcome["at"]
        epoch, joined = outcome["value"]["epoch"], outcome["value"]["joined"]
        device = operation.device
        region = Region(
            process,
            device,
            epoch,
            joined,
            operation.sent,
            began,
            entered,
            operation.max_hold,
            [it for it in operation.siblings if it.is_alive],
            [(it, flight) for it, flight in operation.flights if flight in it.flights],
            set(view.tenants),
            held_until=entered,
            was_stopped=operation.was_stopped,
        )
        before = self.current.get(device)
        if joined:
            outer = [
                it
                for it in self.regions
                if it.process in (process, process.parent) and it.device == device
            ]
            # Its parent may have been in, without having said so yet.
            claim = process.parent.operation if process.parent else None
            is_early = claim is not None and claim.word == CLAIM and claim.device == device
            if not is_early and not any(it.epoch == epoch for it in outer):
                raise ViolationError(f"{region} joined nobody's region")
            process.regions.append(region)
            return
        if before is not None and before.is_active():
            self._taken_away(before, entered, f"I1: {region} begins within {before}")
        for other in self.regions:
            if other.device == device and not other.joined:
                in_order = other.entered >= began or other.epoch < epoch
                if other.epoch == epoch or not in_order:
                    raise ViolationError(f"I1: {region} comes after {other}")
        self._check_order(region, operation)
        for sibling, _ in region.flights:
            is_stuck = any(it.is_stuck for it in sibling.flights if it.device == device)
            if not is_stuck and entered - began < operation.drain_timeout:
                raise ViolationError(f"I2: {region} did not wait for what {sibling} has in flight")
            region.blemishes.append(Blemish("was in flight", sibling))
        # Also what was begun after the claim was waited for by now.
        for it in self.alive():
            for flight in it.flights:
                flight.is_stuck |= flight.device == device
        if process.parent is not None and process.parent.regions and process.parent.is_alive:
            # Its parent held this region's device before: it has waited for that, as a stranger.
            region.siblings = [it for it in region.siblings if it is not process.parent]
        process.regions.append(region)
        self.regions.append(region)
        self.current[device] = region

    def _check_order(self, region: Region, operation: Operation) -> None:
        """I5: whoever overtakes has left a turn to each that was ahead, and could begin."""
        device, process = region.device, region.process
        views = self.closed_views.get(device, {})
        epoch = max((it for it in views if it < region.epoch), default=None)
        if epoch is None:
            return
        view = views[epoch]
        queue: list[str] = view.devices[device]["queue"]
        own = view.tenants.get(process.pid, {}).get("name")
        ahead = []
        for name in queue:
            other = next((it for it in self.alive() if it.pid == view.pid_of(name)), None)
            waits = other is not None and other.operation is not None
            if other is None or other is process or not waits:
                if name == own:
                    break
                continue
            claim = other.operation
            assert claim is not None
            if claim.word != CLAIM or claim.device != device or claim.sent > view.at:
                continue
            if claim.is_late(region.entered) or claim.may_be_absent:
                continue
            if self._conflicts(other, device, view):
                continue
            # A place counts from the asking, so that one who came later may have asked before.
            if own in queue or (region.asked > view.at and claim.priority >= operation.priority):
                ahead.append(other)
        opened = view.at
        for other_region in self.regions:
            if other_region.device == device and other_region.is_over:
                opened = max(opened, other_region.held_until)
        waited = region.entered - opened
        if waited >= TURN:
            for it in self.alive():
                if it.operation is not None:
                    it.operation.may_be_absent = True
        if len(queue) > 1:
            self.decisions += 1
        if waited < TURN * len(ahead):
            raise ViolationError(
                f"I5: {region} overtook {[str(it) for it in ahead]} after only {waited:.4f} s"
            )

    def _taken_away(self, region: Region, now: float, what: str) -> None:
        """The region has certainly lost its tenure by `now`: was there a reason?"""
        is_late = now >= region.asked + region.max_hold
        if not (is_late or region.was_stopped or self.is_starved(region.process)):
            raise ViolationError(what)
        region.is_revoked = True

    def _answered_leave(
        self, process: Process, operation: Operation, outcome: dict[str, Any], view: View
    ) -> None:
        region = process.regions.pop()
        report = outcome.get("report") or outcome.get("value")
        began, ended = outcome["at"]
        region.is_over = True
        if "error" in outcome and (outcome["error"] != "RegionRevoked" or report is None):
            raise ViolationError(f"{region} cannot be left: {outcome}")
        if report["epoch"] != region.epoch or report["joined"] != region.joined:
            raise ViolationError(f"{region} has another one's report: {report}")
        if region.joined:
            return  # What it says is about a region of somebody else's.
        if "error" in outcome:
            starved = outcome["gap"] > STARVED
            is_late = ended >= region.asked + region.max_hold
            if not (region.is_revoked or is_late or region.was_stopped or starved):
                raise ViolationError(f"{region} was revoked without a reason: {outcome}")
            if "longer than max_hold" in outcome["message"] and not is_late:
                raise ViolationError(f"{region} was revoked too early: {outcome}")
            return
        if region.is_revoked:
            raise ViolationError(f"I6: {region} was over, but is left as if it were not: {report}")
        region.held_until = began
        self._check_report(region, report, view)

    def _check_report(self, region: Region, report: dict[str, Any], view: View) -> None:
        undrained = {"timed out"}
        for sibling in report["siblings"]:
            if sibling["submissions"] and sibling["drained"] not in undrained:
                raise ViolationError(f"I2: a sibling submitted within {region}: {report}")
            if sibling["drained"] in undrained:
                self._check_undrained(region, sibling["name"], view)
        if report["verdict"] == "clean":
            if region.blemishes:
                blemishes = [str(it) for it in region.blemishes]
                raise ViolationError(f"{region} is called clean, but {blemishes}: {report}")
            for sibling in report["siblings"]:
                if sibling["frozen"] == "no" or sibling["drained"] in undrained:
                    raise ViolationError(f"{region} is called clean: {report}")

    def _check_undrained(self, region: Region, name: str, view: View) -> None:
        """I7: a drain that timed out had something to wait for, of somebody alive."""
        root = next((it for it in self.processes if it.pid == view.pid_of(name)), None)
        if root is None:
            return
        for it in self.processes:
            if it is not root and it.parent is not root:
                continue
            busy = it.operation is not None and it.operation.word not in (CLAIM, "ping", "say")
            flew = it.flew_until.get(region.device, 0.0) >= region.sent
            if busy or flew or it.flights:
                return
        raise ViolationError(f"I7: {region} waited for {name}, which had nothing in flight")

    def _answered_submit(
        self, process: Process, operation: Operation, outcome: dict[str, Any], view: View
    ) -> None:
        if "error" in outcome:
            raise ViolationError(f"{process} cannot submit: {outcome}")
        unit = self.unit(process, view)
        began, admitted = outcome["at"]
        family = tuple(it for it in (process, process.parent, unit) if it is not None)
        self.submissions.append(Submission(process, family, operation.device, began, admitted))

    def _answered_begin_submission(
        self, process: Process, operation: Operation, outcome: dict[str, Any], view: View
    ) -> None:
        self._answered_submit(process, operation, outcome, view)
        process.flights.append(Flight(operation.device))

    def _answered_ping(
        self, process: Process, operation: Operation, outcome: dict[str, Any], view: View
    ) -> None:
        if outcome.get("value") != process.pid:
            raise ViolationError(f"I8: {process} gives a wrong result: {outcome}")

    def _answered_say(
        self, process: Process, operation: Operation, outcome: dict[str, Any], view: View
    ) -> None:
        if "error" in outcome:
            raise ViolationError(f"{process} cannot say what it does: {outcome}")
        unit = self.unit(process, view)
        if unit is None:
            raise ViolationError(f"{process} said {operation.detail}, but belongs to no tenant")
        others = [
            it
            for it in self.alive()
            if it is not process
            and self.unit(it, view) is unit
            and it.operation is not None
            and it.operation.word == "say"
        ]
        said = self.said.setdefault(unit, [])
        said.append((*outcome["at"], operation.detail))
        # Of several that may have been at it at the same time any can have been the last.
        latest = max(began for began, _, _ in said)
        possible = {phase for _, ended, phase in said if ended >= latest}
        shown = view.tenants[unit.pid]["phase"]
        if not others and shown not in possible:
            raise ViolationError(f"{process} said {operation.detail}, but status shows {shown}")

    def stop(self, process: Process, view: View) -> None:
        process.is_stopped = True
        if process.freezer == "sigstop" or process.parent is not None:
            # Also a child whose parent may have been stopped around a holder.
            process.is_fuzzy |= self._may_get_frozen(process, view)
        for region in process.regions:
            region.was_stopped = True
        if process.operation is not None:
            process.operation.was_stopped = True

    def _may_get_frozen(self, process: Process, view: View) -> bool:
        claims = any(
            it.operation is not None and it.operation.word == CLAIM
            for it in self.alive()
            if it is not process
        )
        return claims or self.may_be_frozen(process, view)

    def resume(self, process: Process) -> None:
        process.is_stopped = False
        process.is_fuzzy = False
        if process.freezer == "sigstop" or process.parent is not None:
            # It runs now, whatever froze it: nothing of krex's expected that signal.
            operations = [it.operation for it in self.alive() if it.operation is not None]
            for it in (*self.current.values(), *operations):
                it.siblings = [sibling for sibling in it.siblings if sibling is not process]

    def ended(self, process: Process, killed_at: float, now: float) -> None:
        process.is_alive = False
        process.is_stopped = False
        operation = process.operation
        if operation is not None and operation.word == "fork":
            process.may_have_left_a_child = True
        process.operation = None
        for flight in process.flights:
            process.flew_until[flight.device] = now
        process.flights.clear()
        for region in process.regions:
            if region.is_active():
                region.held_until = max(region.held_until, killed_at)
            region.is_over = True
        process.regions.clear()

    def supervisor_was_replaced(self, hit_at: float) -> None:
        """A half of the supervisor ended and the other took over: siblings ran for a moment."""
        for region in self.current.values():
            if not region.is_active() or region.entered >= hit_at:
                continue
            for sibling in region.siblings:
                if sibling.is_alive:
                    text = "ran when the supervisor was replaced"
                    region.blemishes.append(Blemish(text, sibling))

    # --- what must be so, always ---

    def observe(self, view: View) -> None:
        for device in view.devices:
            epoch = view.epoch(device)
            if epoch < self.epochs.get(device, 0):
                raise ViolationError(f"I1: the epoch of {device} fell to {epoch}")
            self.epochs[device] = epoch
            self._observe_region(device, view)
            self._observe_holder(device, view)
            self._observe_queue(device, view)
        self.check_submissions()

    def _observe_region(self, device: str, view: View) -> None:
        region = self.current.get(device)
        if region is None or not region.is_active():
            return
        holds = (
            not view.is_open(device)
            and view.epoch(device) == region.epoch
            and self.holder(device, view) is region.process
        )
        if not holds:
            self._taken_away(
                region, view.at, f"I1: {region} is over too early: {view.devices[device]}"
            )
            return
        region.held_until = max(region.held_until, view.at)
        for pid, tenant in view.tenants.items():
            known = next((it for it in self.processes if it.pid == pid), None)
            if known is None or pid in region.tenants or device not in tenant["devices"]:
                continue
            region.tenants.add(pid)
            if known.kind == "bare" and known is not region.process:
                region.blemishes.append(Blemish("attached meanwhile", known))

    def _observe_holder(self, device: str, view: View) -> None:
        if view.is_open(device):
            return
        self.closed_views.setdefault(device, {})[view.epoch(device)] = view
        holder = self.holder(device, view)
        if holder is None or not holder.is_alive:
            return  # To be gone soon: `unmet` sees to it.
        operation = holder.operation
        if view.devices[device]["phase"] in GRANTED and operation is not None:
            operation.may_be_absent = True  # Should it not enter with this grant.
        asks = operation is not None and operation.word in (CLAIM, "leave", "leave_code")
        holds = any(it.device == device and not it.joined for it in holder.regions)
        if not asks and not holds:
            raise ViolationError(
                f"I6: {holder} holds {device} without asking: {view.devices[device]}"
            )

    def _observe_queue(self, device: str, view: View) -> None:
        queue: list[str] = view.devices[device]["queue"]
        claims = []
        for name in queue:
            process = next((it for it in self.processes if it.pid == view.pid_of(name)), None)
            if process is None or not process.is_alive or process.operation is None:
                continue
            if process.operation.word == CLAIM and process.operation.device == device:
                claims.append(process.operation)
        for number, claim in enumerate(claims):
            waited = view.at - claim.sent
            if any(it.priority - claim.priority > waited / AGEING for it in claims[number + 1 :]):
                raise ViolationError(f"I5: the queue of {device} is out of order: {claims}")

    def check_submissions(self) -> None:
        """I2: no sibling began a submission, and was admitted, while a region was held."""
        for region in self.regions:
            for it in self.submissions:
                if (
                    it.device == region.device
                    and region.process not in it.family
                    and region.entered < it.began
                    and it.admitted < region.held_until
                ):
                    raise ViolationError(
                        f"I2: a submission of {it.process} ({it.began:.4f} to {it.admitted:.4f}) "
                        f"within {region} ({region.entered:.4f} to {region.held_until:.4f})"
                    )

    # --- what must become so ---

    def unmet(self, view: View, is_frozen: Callable[[int], bool], now: float) -> list[str]:
        """What still has to happen, given who can run."""
        missing = []
        for process in self.processes:
            if not process.is_alive:
                missing += self._unmet_of_dead(process, view)
                continue
            if self._must_answer(process, view, now):
                missing.append(f"I4: an answer of {process}: {process.operation}")
            idle = not process.is_stopped and not process.is_fuzzy
            if idle and not self.may_be_frozen(process, view) and is_frozen(process.pid):
                missing.append(f"I3: the thaw of {process}")
        for device in view.closed():
            holder = self.holder(device, view)
            if holder is None:
                missing.append(f"I7: {device} is held by nobody: {view.devices[device]}")
            elif not holder.is_alive:
                missing.append(f"I7: {device} is still held by the dead {holder}")
            region = self.current.get(device)
            if region is None or region.is_over or view.epoch(device) != region.epoch:
                continue
            missing += self._unmet_of_region(region, view, is_frozen, now)
        return missing

    def _unmet_of_dead(self, process: Process, view: View) -> list[str]:
        family = [it for it in self.alive() if it.parent is process]
        if family or process.may_have_left_a_child:
            return []
        missing = []
        if process.pid in view.tenants:
            missing.append(f"I7: the slot of the dead {process}")
        return missing

    def _unmet_of_region(
        self, region: Region, view: View, is_frozen: Callable[[int], bool], now: float
    ) -> list[str]:
        holder, device = region.process, region.device
        if region.is_ending or not holder.is_alive:
            return []
        missing = []
        if now > region.entered + region.max_hold:
            missing.append(f"I3: the end of {region}, which is past its max_hold")
        if holder.is_fuzzy:
            return missing
        if holder.is_stopped:
            waiting = [
                it
                for it in self.alive()
                if it.operation is not None
                and it.operation.word in (CLAIM, *SUBMISSIONS)
                and it.operation.device == device
                and not self.passes(it, holder, view)
                and not it.is_stopped
                and not it.is_fuzzy
                and not any(
                    self.holder(other, view) is not holder and other in self.devices(it, view)
                    for other in view.closed()
                )
            ]
            if waiting:
                missing.append(f"I3: the end of {region}, stopped, while {waiting[0]} waits")
            return missing
        missing += [
            f"I3: the freeze of {it} for {region}"
            for it in region.siblings
            if it.is_alive
            and it.pid in view.tenants
            and not it.is_fuzzy
            and not is_frozen(it.pid)
            and not region.was_stopped
            and now < region.asked + region.max_hold
        ]
        return missing

    def _must_answer(self, process: Process, view: View, now: float) -> bool:
        operation = process.operation
        if operation is None or not self.can_run(process, view):
            return False
        device = operation.device
        if operation.word == "start":
            return all(view.is_open(it) for it in process.devices)
        if operation.word in SUBMISSIONS:
            is_free = view.is_open(device)
            is_free = is_free or self.passes(process, self.holder(device, view), view)
            return is_free or operation.is_late(now)
        if operation.word != CLAIM or process.regions:
            return True
        if operation.is_late(now):
            return True
        holder = self.holder(device, view)
        if holder is process:
            return True
        if not view.is_open(device):
            # A child whose parent holds the region joins it.
            region = self.current.get(device)
            return (
                holder is not None
                and process.descends_from(holder)
                and region is not None
                and region.process is holder
                and region.is_active()
                and not region.was_stopped
                and region.entered < operation.sent
            )
        return not self._conflicts(process, device, view)

    def _conflicts(self, process: Process, device: str, view: View) -> bool:
        """Whether a region on another device stands in the way of a claim."""
        for other in view.closed():
            holder = self.holder(other, view)
            if other == device or holder is None:
                continue
            concerned = device in self.devices(holder, view) or other in self.devices(process, view)
            unit = self.unit(process, view) or process
            related = (
                unit is holder
                or process is holder
                or process.descends_from(holder)
                or holder.descends_from(unit)
            )
            if concerned and not related:
                return True
        return False
