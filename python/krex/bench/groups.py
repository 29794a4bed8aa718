"""Kernels of a GPU in two groups: those that the GPU bounds, and those that launching bounds.

A launch takes microseconds of a CPU, and its time varies by itself: commands that run alone agree
with each other in a few percent to all of their timings, depending on the machine. So such kinds
are reported apart, with what solo itself reaches as their ceiling, and do not make a run
inconclusive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from krex._text import printable, table
from krex.bench.cuda import is_gpu
from krex.bench.statistics import percentile, share_within

#: Milliseconds per launch; what takes longer has its launches ahead of it in the queue.
SHORTEST_MS = 0.020


def launch_bound(references: Mapping[str, Mapping[str, Any]], device: str) -> set[str]:
    """Return the kinds whose reference is too short for the GPU to bound it."""
    if not is_gpu(device):
        return set()
    medians = {kind: found["median_ms"] for kind, found in references.items()}
    return {kind for kind, ms in medians.items() if ms is not None and ms <= SHORTEST_MS}


def summarise(
    policies: Sequence[Mapping[str, Any]],
    references: Mapping[str, Mapping[str, Any]],
    device: str,
) -> list[dict[str, Any]]:
    """Return one entry per group and policy, of policies that have their measurements."""
    if not is_gpu(device):
        return []
    short = launch_bound(references, device)
    found = []
    for name, kinds in (("over 20 us", set(references) - short), ("launch-bound", short)):
        for policy in policies if kinds else ():
            ratios = [
                it["inflation"]
                for it in policy["measurements"]
                if it["kind"] in kinds and it["inflation"] is not None
            ]
            found.append(
                {
                    "group": name,
                    "kinds": sorted(kinds),
                    "policy": policy["policy"],
                    "compared": len(ratios),
                    "within_2pct": share_within(ratios, 0.02),
                    "within_5pct": share_within(ratios, 0.05),
                    "within_10pct": share_within(ratios, 0.10),
                    "inflation_p50": percentile(ratios, 0.50),
                    "inflation_p95": percentile(ratios, 0.95),
                    "inflation_max": percentile(ratios, 1.0),
                }
            )
    return found


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return the groups of `Results.to_dict` as a table; nothing if there are none."""
    groups: Sequence[Mapping[str, Any]] = data["groups"]
    if not groups:
        return []
    header = ["kernels", "policy", "compared", "within 2%", "5%", "10%"]
    header += ["inflation p50", "p95", "max"]
    rows = []
    for it in groups:
        shares = [_form(it[f"within_{name}"], "{:.1%}") for name in ("2pct", "5pct", "10pct")]
        ratios = [_form(it[f"inflation_{name}"], "{:.3f}x") for name in ("p50", "p95", "max")]
        rows.append([it["group"], it["policy"], str(it["compared"]), *shares, *ratios])
    text = table(header, rows)
    for name in dict.fromkeys(it["group"] for it in groups):
        kinds = next(it["kinds"] for it in groups if it["group"] == name)
        ceiling = ", whose ceiling is what solo reaches" if name == "launch-bound" else ""
        text.append(f"{name}: {', '.join(printable(kind) for kind in kinds)}{ceiling}")
    return text


def _form(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
