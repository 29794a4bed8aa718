"""``krex status``: the devices, their gates, holders and queues, and the tenants, as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from krex._text import printable, table, terminal_width

Snapshot = Mapping[str, Any]


def take(runtime_dir: str | None = None) -> dict[str, Any]:
    """Return a snapshot of a runtime directory's segment (None: the environment's).

    GPUs have nvidia-smi's `index` and what they are called, `product`, if NVML tells in time.

    Raises:
        krex.SegmentError: the segment cannot be read; the message has the remedy.
    """
    from krex import _krex

    snapshot = _krex.snapshot(runtime_dir)
    for device in snapshot["devices"]:
        device.update(index=None, product=None)
    if any(_is_gpu(device) for device in snapshot["devices"]):
        from krex import nvml

        listed = nvml.gpus()
        for device in snapshot["devices"]:
            index, product = listed.get(device["name"], (None, None))
            device.update(index=index, product=product)
    return snapshot


def _is_gpu(device: Snapshot) -> bool:
    return str(device["name"]).startswith(("GPU-", "MIG-"))


def as_json(snapshot: Snapshot) -> str:
    """Return the snapshot, and nothing else, as JSON."""
    import json

    return json.dumps(snapshot, indent=2)


def as_text(snapshot: Snapshot, width: int | None = None) -> str:
    """Return the snapshot as tables, no wider than `width` columns where that can be done."""
    blocks = [[_headline(snapshot)]]
    if not any(snapshot.get(part) for part in ("devices", "tenants", "supervisors")):
        blocks.append(["nothing is running"])
    if snapshot.get("devices"):
        blocks.append(_devices(snapshot["devices"], width))
    if snapshot.get("tenants"):
        blocks.append(_tenants(snapshot["tenants"], width))
    if snapshot.get("supervisors"):
        blocks.append(_supervisors(snapshot["supervisors"], width))
    return "\n\n".join("\n".join(block) for block in blocks)


def show(*, as_json_text: bool) -> None:
    """Print a snapshot of the environment's runtime directory on standard output."""
    snapshot = take()
    print(as_json(snapshot) if as_json_text else as_text(snapshot, terminal_width()))


def _headline(snapshot: Snapshot) -> str:
    line = f"runtime directory {_cell(snapshot.get('runtime_dir'))}"
    if snapshot.get("layout") is not None:
        line += f" (layout {_cell(snapshot['layout'])}, krex {_cell(snapshot.get('version'))})"
    return line


def _devices(devices: Sequence[Snapshot], width: int | None) -> list[str]:
    rows = [
        [
            _cell(device.get("name")),
            _cell(device.get("phase")),
            _cell(device.get("epoch")),
            _cell(device.get("holder")),
            _cell(device.get("label")),
            _seconds(device.get("held_s")),
            _cell(device.get("cpus")),
            _cell(device.get("queue")),
        ]
        for device in devices
    ]
    head = ["DEVICE", "GATE", "EPOCH", "HOLDER", "LABEL", "HELD", "CPUS", "QUEUE"]
    lines = table(head, rows, width)
    known = [it for it in devices if it.get("index") is not None]
    lines += [f"{_cell(it['name'])} is GPU {it['index']}, {_cell(it['product'])}" for it in known]
    return lines


def _tenants(tenants: Iterable[Snapshot], width: int | None) -> list[str]:
    rows = [
        [
            _cell(tenant.get("name")),
            _cell(tenant.get("pid")),
            _cell(tenant.get("state")),
            _cell(tenant.get("phase")),
            _cell(tenant.get("devices")),
            _cell(tenant.get("frozen")),
            _cell(tenant.get("freezer")),
        ]
        for tenant in tenants
    ]
    return table(["TENANT", "PID", "STATE", "PHASE", "DEVICES", "FROZEN", "FREEZER"], rows, width)


def _supervisors(supervisors: Iterable[Snapshot], width: int | None) -> list[str]:
    rows = [
        [
            _cell(supervisor.get("pid")),
            _cell(supervisor.get("worker_pid")),
            _cell(supervisor.get("alive")),
        ]
        for supervisor in supervisors
    ]
    return table(["SUPERVISOR", "WORKER", "ALIVE"], rows, width)


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Sequence):
        return ", ".join(_cell(item) for item in value) or "-"
    return printable(str(value))


def _seconds(value: object) -> str:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return _cell(value)
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"
