"""What krex raises. Bad arguments are `ValueError`; everything else is below `KrexError`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from krex._krex import Report

__all__ = [
    "KrexError",
    "RegionError",
    "RegionRevoked",
    "RegionTimeout",
    "SegmentError",
    "UnknownDevice",
]


class KrexError(RuntimeError):
    """krex cannot do what was asked; the message says why and what helps."""


class SegmentError(KrexError, OSError):
    """The runtime directory or the shared segment in it cannot be used."""


class UnknownDevice(ValueError):  # noqa: N818 - named for what it tells, as LookupErrors are
    """No device has this name."""


class RegionError(KrexError):
    """A region is used in a way that makes no sense: read early, or nested on another device."""


class RegionTimeout(RegionError, TimeoutError):  # noqa: N818 - the field's name for it
    """The region could not be entered within `timeout`."""


class RegionRevoked(RegionError):  # noqa: N818 - the field's name for it
    """The region was taken away before its end: its measurement is void.

    `report` is the region's report, with the verdict ``revoked``; None outside of regions.
    """

    report: Report | None = None
