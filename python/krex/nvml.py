"""Looks at a GPU before and after a region, through NVIDIA's management library (NVML).

What a look finds is in the region's report: how fast the GPU's clock was, whether the GPU had
slowed itself down (verdict ``throttled``), and whether a process was on it that krex does not know
(verdict ``foreign``). It takes NVIDIA's own binding, which the extra ``krex[nvidia]`` installs;
without it, or without NVML, there is no look and the report's `clocks` is None.

Looks take locks of the driver, for which whoever submits waits. So nobody looks while somebody is
in a region on the GPU: the first look comes before the claim, the second after the gate is open.
Each runs in a thread of its own, which has ended before the region begins: the library can hang
when a GPU does, and a call into it cannot be broken off. One that does not come back in time is
left behind; the process does not look again, and its regions are ``unknown``.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from krex import _krex

__all__ = ["FIRST_LIMIT_S", "LIMIT_S", "SLOWDOWNS", "Sample", "bounded", "gpus"]

_Result = TypeVar("_Result")

#: How long a look may take, in seconds: the first one of a process, which starts the library, and
#: the others. A look takes about 20 us (H200); starting the library takes longer where nothing
#: keeps the driver awake (persistence mode).
FIRST_LIMIT_S = 5.0
LIMIT_S = 1.0

#: NVML's clock-event reasons (`nvmlClocksEventReason…`), by their bits.
EVENTS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}

#: Those for which a region is ``throttled``: the GPU is too hot, or its supply brakes it, so that
#: it is slower than the same work would find it at another time. ``sw_power_cap`` is not one: work
#: that draws full power runs under the cap on every day, and alone, too.
SLOWDOWNS = frozenset(
    {"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"}
)


@dataclass(frozen=True)
class Sample:
    """What NVML said at one moment."""

    index: int
    """nvidia-smi's; that of the whole GPU for a part of one (MIG)."""
    name: str
    sm_mhz: int | None
    """The clock of the multiprocessors, in MHz; None where the GPU does not tell."""
    events: tuple[str, ...]
    """Why the clock is not higher: names from `EVENTS`."""
    pids: tuple[int, ...]
    """Processes with a context on the GPU."""

    def to_dict(self) -> dict[str, Any]:
        """Return what reports show of it."""
        return {
            "sm_mhz": self.sm_mhz,
            "events": list(self.events),
            "processes": len(self.pids),
        }


@dataclass(frozen=True)
class _Look:
    sample: Sample | None = None
    problem: str | None = None
    """Why nothing is known that should be."""
    stranger: tuple[str, str] | None = None
    """Verdict and reason, if there are processes that krex does not know."""


class _UnavailableError(Exception):
    """There is nothing to look with, and nothing is wrong with that."""


@dataclass
class _State:
    """Of NVML, in this process."""

    handles: dict[str, tuple[Any, Any, int, str]]
    started: bool = False
    unavailable: bool = False
    hung: bool = False


_state = _State({})


def _forget() -> None:
    """Start the library anew in a forked child. One that hung is not tried again there either."""
    global _state
    _state = _State({}, unavailable=_state.unavailable, hung=_state.hung)


os.register_at_fork(after_in_child=_forget)


def bounded(work: Callable[[], _Result], limit_s: float) -> _Result:
    """Call `work` in a thread that is left behind if it takes longer than `limit_s` seconds.

    The thread is unknown to `threading`, so that nobody counts it or waits for it.

    Raises:
        TimeoutError: it took longer. What `work` raises is raised here.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            done.release()

    _thread.start_new_thread(run, ())
    if not done.acquire(timeout=limit_s):
        raise TimeoutError(f"no answer within {limit_s} s")
    if errors:
        raise errors[0]
    return results[0]


def gpus(limit_s: float = 2.0) -> dict[str, tuple[int, str]]:
    """Return nvidia-smi's index and the name of each GPU, by UUID; nothing if NVML does not tell.

    It needs no binding.
    """
    from krex.errors import KrexError

    try:
        listed = bounded(_krex.gpus, limit_s)
    except (KrexError, OSError, RuntimeError):
        return {}
    return {uuid: (index, name) for index, uuid, name in listed}


def _look(uuid: str) -> _Look:
    """Look at the GPU `uuid`."""
    if _state.unavailable:
        return _Look()
    if _state.hung:
        return _Look(problem="NVML was not asked, since it had not answered before")
    try:
        import pynvml
    except Exception:  # Not there, or not what it should be: that must not keep a region.
        _state.unavailable = True
        return _Look()
    limit = LIMIT_S if _state.started else FIRST_LIMIT_S
    try:
        sample = bounded(lambda: _sample(pynvml, uuid, _state), limit)
    except _UnavailableError:
        return _Look()
    except TimeoutError:
        _state.hung = True
        return _Look(problem=f"NVML did not answer within {limit:g} s")
    except pynvml.NVMLError as error:
        return _Look(problem=f"NVML says: {error}")
    except Exception as error:  # The binding is an old one, say, or no thread can be started.
        return _Look(problem=f"NVML could not be asked ({error!r})")
    return _Look(sample, stranger=_krex.strangers(uuid, list(sample.pids)))


def _sample(pynvml: Any, uuid: str, state: _State) -> Sample:
    gpu, whole, index, name = _handles(pynvml, uuid, state)

    def ask(question: Callable[[], Any], default: Any) -> Any:
        try:
            return question()
        except (
            pynvml.NVMLError_NotSupported,
            pynvml.NVMLError_NoPermission,
            pynvml.NVMLError_FunctionNotFound,
        ):
            return default

    # Named so since driver 535; before that they were called reasons for throttling.
    reasons = getattr(
        pynvml,
        "nvmlDeviceGetCurrentClocksEventReasons",
        getattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None),
    )
    mask = ask(lambda: reasons(whole), 0) if reasons is not None else 0
    return Sample(
        index=index,
        name=name,
        sm_mhz=ask(lambda: pynvml.nvmlDeviceGetClockInfo(whole, pynvml.NVML_CLOCK_SM), None),
        events=tuple(event for bit, event in EVENTS.items() if mask & bit),
        pids=tuple(it.pid for it in ask(lambda: _processes(pynvml, gpu), [])),
    )


def _processes(pynvml: Any, gpu: Any) -> list[Any]:
    processes: list[Any] = pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    return processes


def _handles(pynvml: Any, uuid: str, state: _State) -> tuple[Any, Any, int, str]:
    """The GPU or part, the whole GPU, and that one's index and name. Starts the library."""
    if uuid in state.handles:
        return state.handles[uuid]
    try:
        if not state.started:
            pynvml.nvmlInit()
            state.started = True
    except (
        pynvml.NVMLError_LibraryNotFound,
        pynvml.NVMLError_DriverNotLoaded,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoPermission,
    ) as error:
        state.unavailable = True
        raise _UnavailableError from error
    try:
        gpu = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except (pynvml.NVMLError_NotFound, pynvml.NVMLError_InvalidArgument) as error:
        raise _UnavailableError from error
    whole = gpu
    if uuid.startswith("MIG-"):  # Clocks are those of the whole GPU.
        whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(gpu)
    name = pynvml.nvmlDeviceGetName(whole)
    name = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    state.handles[uuid] = (gpu, whole, int(pynvml.nvmlDeviceGetIndex(whole)), name)
    return state.handles[uuid]


def _judge(
    uuid: str, before: _Look | None, after: _Look | None
) -> tuple[str | None, dict[str, Any] | None, list[tuple[str, str]]]:
    """Return which GPU it was, what the report's `clocks` says, and verdicts with reasons."""
    looks = {"before": before, "after": after}
    samples = {when: look.sample for when, look in looks.items() if look and look.sample}
    problems: list[tuple[str, str]] = []
    for when, look in looks.items():
        if look and look.problem:
            problems.append(("unknown", f"{look.problem}, {when} the region"))
    for when, sample in samples.items():
        if slow := [event for event in sample.events if event in SLOWDOWNS]:
            clock = "" if sample.sm_mhz is None else f" to {sample.sm_mhz} MHz"
            reason = f"the GPU had slowed down{clock} {when} the region ({', '.join(slow)})"
            problems.append(("throttled", reason))
    problems += dict.fromkeys(look.stranger for look in looks.values() if look and look.stranger)
    if not samples:
        return None, None, problems
    last = list(samples.values())[-1]
    clocks = {when: samples[when].to_dict() if when in samples else None for when in looks}
    return f"{last.index}: {last.name}", clocks, problems
