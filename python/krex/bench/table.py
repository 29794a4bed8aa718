"""A run's results as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from krex._text import cut, printable, table
from krex.bench import groups
from krex.bench.machine import in_words
from krex.bench.policies import KREX, POLICIES
from krex.bench.summary import NOT_TOLD

_NONE = "-"
# Columns of a name in a table.
_LONGEST_NAME = 40


def lines(data: Mapping[str, Any]) -> list[str]:
    """Return what `Results.to_dict` says, as lines for a terminal."""
    settings = data["settings"]
    cpus = len(settings["cpus"])
    text = [
        f"krex {data['krex_version']} on {printable(in_words(data['machine']))}",
        f"{settings['count']} commands per turn, {settings['rounds']} rounds, "
        f"{settings['width']} at once on {cpus} CPU{'s' if cpus != 1 else ''}, "
        f"{settings['threads']} thread{'s' if settings['threads'] != 1 else ''} each",
        "",
        *_policies(data),
        "",
        *_kinds(data),
    ]
    for section in (
        groups.lines(data),
        _broken(data),
        _regions(data),
        _reasons(data),
        _verdict(data),
    ):
        if section:
            text += ["", *section]
    return text


def _policies(data: Mapping[str, Any]) -> list[str]:
    header = ["policy", "commands/min", "usable", "of those within 2%", "5%", "10%"]
    header += ["inflation p50", "p95", "max", "others", "verdicts"]
    rows = []
    for entry in data["policies"]:
        usable = f"{entry['usable']}/{entry['commands']}"
        row = [entry["policy"], _number(entry["commands_per_minute"], "{:.0f}"), usable]
        if not entry["usable"]:
            rows.append([*row, *[_NONE] * 7, "no usable measurements"])
            continue
        row += [_percent(entry[name]) for name in ("within_2pct", "within_5pct", "within_10pct")]
        row += [_times(entry[f"inflation_{name}"]) for name in ("p50", "p95", "max")]
        row.append(_percent(entry["others_share"]))
        rows.append([*row, _verdicts(entry)])
    return table(header, rows)


def _verdicts(entry: Mapping[str, Any]) -> str:
    counts = dict(entry["verdicts"])
    untold = counts.pop(NOT_TOLD, 0)
    told = [f"{_short(name)} {count}" for name, count in counts.items()]
    if untold and (told or entry["policy"] == KREX.name):
        told.append(f"{untold} told none")
    return ", ".join(told) or _NONE


def _kinds(data: Mapping[str, Any]) -> list[str]:
    """Return a table of each policy's share within 5% per kind, and of the references."""
    names = [entry["policy"] for entry in data["policies"]]
    header = ["within 5%, by kind", *names, "solo's median", "at first", "at last"]
    rows = []
    for kind, found in data["references"].items():
        times = [_number(found[name], "{:.4g} ms") for name in ("median_ms", "before_ms")]
        times.append(_number(found["after_ms"], "{:.4g} ms"))
        shares = [_percent(entry["kinds"][kind]["within_5pct"]) for entry in data["policies"]]
        rows.append([_short(kind), *shares, *times])
    return table(header, rows) if rows else ["no usable measurements"]


def _broken(data: Mapping[str, Any]) -> list[str]:
    text = []
    for entry in data["policies"]:
        if not entry["broken"]:
            continue
        counts = ", ".join(f"{count} {outcome}" for outcome, count in entry["broken"].items())
        total = sum(entry["broken"].values())
        text.append(f"{entry['policy']}: {total} of {entry['commands']} commands broke: {counts}")
        details = Counter(
            f"{_short(it['kind'])}: {printable(it['detail'])}"
            for it in entry["measurements"]
            if it["outcome"] != "ok"
        )
        text += [f"  {count} x {detail}" for detail, count in details.most_common(3)]
    return text


def _regions(data: Mapping[str, Any]) -> list[str]:
    """Say so if a policy had nothing to protect."""
    text = []
    for entry in data["policies"]:
        if not POLICIES[entry["policy"]].counts_regions or entry["regions"] is None:
            continue
        # Under krex, commands tell it themselves: a region that was counted may be that of a
        # command that broke.
        untold = entry["verdicts"].get(NOT_TOLD, 0) if entry["policy"] == KREX.name else 0
        if untold:
            text.append(
                f"krex: {untold} of {entry['usable']} usable commands told no verdict "
                f"(regions of all {entry['commands']} commands: {entry['regions']}); those that "
                "mark no region ran unprotected: use krex.bench.region() or krex.region.critical()"
            )
        elif entry["regions"] < entry["usable"] and entry["policy"] != KREX.name:
            text.append(
                f"{entry['policy']}: only {entry['regions']} regions in {entry['usable']} usable "
                "commands; the others ran unprotected: mark theirs with krex.bench.region()"
            )
    return text


def _reasons(data: Mapping[str, Any]) -> list[str]:
    reasons = Counter(
        reason
        for entry in data["policies"]
        for it in entry["measurements"]
        for reason in it["reasons"]
    )
    return [f"{count} x {printable(reason)}" for reason, count in reasons.most_common(3)]


def _verdict(data: Mapping[str, Any]) -> list[str]:
    text = []
    if not data["is_finished"]:
        done = sum(entry["commands"] for entry in data["policies"])
        text.append(f"interrupted after {done} commands")
    if data["busy_before"] >= 0.05:
        text.append(f"other processes used {data['busy_before']:.0%} of the CPUs before the start")
    if stopped := sum(entry["stopped_s"] for entry in data["policies"]):
        text.append(
            f"krex bench itself was stopped for {stopped:.0f} s while commands ran; "
            "this is not in commands/min"
        )
    if not data["is_conclusive"]:
        text.append("inconclusive:")
        text += [f"  {printable(doubt)}" for doubt in data["inconclusive_because"]]
    return text


def _short(name: str) -> str:
    return cut(printable(name), _LONGEST_NAME)


def _number(value: float | None, form: str) -> str:
    return _NONE if value is None else form.format(value)


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{share:.0%}"


def _times(ratio: float | None) -> str:
    return _NONE if ratio is None else f"{ratio:.2f}x"
