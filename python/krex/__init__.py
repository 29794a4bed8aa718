"""krex: share the GPU for everything except the marked region.

>>> import krex.region as region
>>> with region.critical():
...     pass  # alone on the device, all siblings frozen

Everything here is loaded on first use, so that ``import krex`` costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from krex import region
    from krex._krex import InFlightCounter, SharedMemoryGate, __version__, recover, snapshot
    from krex._krex import Submission as submission  # noqa: N813 - it is used like a function
    from krex.activity import phase
    from krex.errors import (
        KrexError,
        RegionError,
        RegionRevoked,
        RegionTimeout,
        SegmentError,
        UnknownDevice,
    )

__all__ = [
    "InFlightCounter",
    "KrexError",
    "RegionError",
    "RegionRevoked",
    "RegionTimeout",
    "SegmentError",
    "SharedMemoryGate",
    "UnknownDevice",
    "__version__",
    "phase",
    "recover",
    "region",
    "snapshot",
    "submission",
]

# Where each name comes from: (module, name in it; "" for the module itself).
_SOURCES = {
    "InFlightCounter": ("krex._krex", "InFlightCounter"),
    "KrexError": ("krex.errors", "KrexError"),
    "RegionError": ("krex.errors", "RegionError"),
    "RegionRevoked": ("krex.errors", "RegionRevoked"),
    "RegionTimeout": ("krex.errors", "RegionTimeout"),
    "SegmentError": ("krex.errors", "SegmentError"),
    "SharedMemoryGate": ("krex._krex", "SharedMemoryGate"),
    "UnknownDevice": ("krex.errors", "UnknownDevice"),
    "__version__": ("krex._krex", "__version__"),
    "phase": ("krex.activity", "phase"),
    "recover": ("krex._krex", "recover"),
    "region": ("krex.region", ""),
    "snapshot": ("krex._krex", "snapshot"),
    "submission": ("krex._krex", "Submission"),
}


def __getattr__(name: str) -> Any:
    source = _SOURCES.get(name)
    if source is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(source[0])
    value = getattr(module, source[1]) if source[1] else module
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
