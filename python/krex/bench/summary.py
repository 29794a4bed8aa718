"""What a run's measurements say: per policy, against solo; and whether they say anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from krex.bench.groups import launch_bound
from krex.bench.measurement import Measurement
from krex.bench.policies import SOLO
from krex.bench.settings import Settings
from krex.bench.statistics import median, percentile, relative_difference, share_within

#: By how much solo's median may move between the beginning and the end of a run.
LARGEST_DRIFT = 0.03
#: Solo itself has to come within 5% of its own median this often.
LEAST_REPEATABILITY = 0.80
#: A larger share of broken commands, which are in no other share, could change what those say.
LARGEST_BROKEN = 0.05
#: Fewer references of a kind than this say nothing.
FEWEST_REFERENCES = 3
#: In the place of the verdict of commands that print none.
NOT_TOLD = "not told"

_TOLERANCES = {"within_2pct": 0.02, "within_5pct": 0.05, "within_10pct": 0.10}
_INFLATIONS = {"inflation_p50": 0.5, "inflation_p95": 0.95, "inflation_max": 1.0}


class _Turns(Protocol):
    seconds: float
    regions: int | None
    others_s: float
    stopped_s: float


@dataclass(frozen=True)
class Summary:
    """References, one entry per policy, and what makes the run inconclusive."""

    references: dict[str, dict[str, Any]]
    policies: list[dict[str, Any]]
    doubts: list[str]

    def inflation(self, measurement: Measurement) -> float | None:
        """Return a measurement divided by its kind's reference; None if one of them is missing."""
        return _inflation(measurement, self.references)


def summarise(
    measurements: Sequence[Measurement], settings: Settings, turns: Mapping[str, _Turns]
) -> Summary:
    """Return what measurements say; what is not known is None, never NaN."""
    references = _references(measurements, settings)
    policies = []
    for policy in settings.policies:
        own = [it for it in measurements if it.policy == policy.name]
        width = 1 if policy.is_serial else settings.width
        entry = _entry(policy.name, width, own, references, turns.get(policy.name))
        cpu_s = (entry["seconds"] + entry["stopped_s"]) * len(settings.cpus)
        others_s = turns[policy.name].others_s if policy.name in turns else 0.0
        policies.append(entry | {"others_share": min(1.0, others_s / cpu_s) if cpu_s else None})
    short = launch_bound(references, settings.device)
    judged = {kind: found for kind, found in references.items() if kind not in short}
    return Summary(references, policies, _doubts(policies, judged))


def _references(
    measurements: Sequence[Measurement], settings: Settings
) -> dict[str, dict[str, Any]]:
    """Return solo's median per kind, of the whole run, of its beginning, and of its end."""
    solo = [it for it in measurements if it.policy == SOLO.name]
    half = (settings.rounds + 1) // 2
    last = settings.rounds + 1 - half
    references = {}
    for kind in sorted({it.kind for it in measurements if it.outcome == "ok"}):
        own = [it for it in solo if it.kind == kind and it.ms is not None]
        times = [it.ms for it in own if it.ms is not None]
        middle = median(times)
        references[kind] = {
            "count": len(times),
            "median_ms": middle,
            "before_ms": median([it.ms for it in own if it.round <= half and it.ms is not None]),
            "after_ms": median([it.ms for it in own if it.round > last and it.ms is not None]),
            "within_5pct": share_within([ms / middle for ms in times], 0.05) if middle else None,
        }
    return references


def _inflation(
    measurement: Measurement, references: Mapping[str, Mapping[str, Any]]
) -> float | None:
    reference = references.get(measurement.kind, {}).get("median_ms")
    if measurement.ms is None or not reference:
        return None
    return float(measurement.ms / reference)


def _entry(
    policy: str,
    width: int,
    measurements: Sequence[Measurement],
    references: Mapping[str, Mapping[str, Any]],
    turns: _Turns | None,
) -> dict[str, Any]:
    usable = [it for it in measurements if it.outcome == "ok"]
    seconds = turns.seconds if turns else 0.0
    broken = Counter(it.outcome for it in measurements if it.outcome != "ok")
    return {
        "policy": policy,
        "width": width,
        "commands": len(measurements),
        "usable": len(usable),
        "broken": dict(sorted(broken.items())),
        "seconds": seconds,
        "stopped_s": turns.stopped_s if turns else 0.0,
        "commands_per_minute": 60 * len(usable) / seconds if usable and seconds else None,
        **_fidelity(usable, references),
        "verdicts": dict(sorted(Counter(it.verdict or NOT_TOLD for it in usable).items())),
        "regions": turns.regions if turns else None,
        "kinds": {
            kind: _fidelity([it for it in usable if it.kind == kind], references)
            for kind in references
        },
    }


def _fidelity(
    usable: Sequence[Measurement], references: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    ratios = [ratio for it in usable if (ratio := _inflation(it, references)) is not None]
    return {
        "compared": len(ratios),
        **{name: share_within(ratios, tolerance) for name, tolerance in _TOLERANCES.items()},
        **{name: percentile(ratios, share) for name, share in _INFLATIONS.items()},
    }


def _doubts(
    policies: Sequence[Mapping[str, Any]], references: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    doubts = []
    for kind, found in references.items():
        if found["count"] < FEWEST_REFERENCES:
            doubts.append(
                f"{kind}: {found['count']} usable solo measurements, at least "
                f"{FEWEST_REFERENCES} are needed"
            )
        elif found["before_ms"] is None or found["after_ms"] is None:
            doubts.append(f"{kind}: solo was not measured both at the beginning and at the end")
        else:
            drift = relative_difference(found["before_ms"], found["after_ms"])
            if drift > LARGEST_DRIFT:
                doubts.append(
                    f"{kind}: solo's median moved by {drift:.1%} during the run, "
                    f"from {found['before_ms']:.4g} to {found['after_ms']:.4g} ms "
                    f"(more than {LARGEST_DRIFT:.0%})"
                )
        # Of fewer, the median itself is most of them.
        share = found["within_5pct"]
        if found["count"] >= FEWEST_REFERENCES and share < LEAST_REPEATABILITY:
            doubts.append(
                f"{kind}: solo itself came within 5% of its median in {share:.0%} only "
                f"(less than {LEAST_REPEATABILITY:.0%})"
            )
    for entry in policies:
        broken = entry["commands"] - entry["usable"]
        if not entry["usable"]:
            doubts.append(f"{entry['policy']}: no usable measurements")
        elif broken > LARGEST_BROKEN * entry["commands"]:
            doubts.append(
                f"{entry['policy']}: {broken} of {entry['commands']} commands broke "
                f"(more than {LARGEST_BROKEN:.0%}), and are in none of its timings"
            )
    return doubts
