"""From measurements to numbers. Nothing here knows where they come from."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which the `share` (0 to 1) of `values` lies; None if there are none.

    Between two values it is interpolated linearly, as numpy does by default, so that a share of
    0.5 is the median.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"a share is between 0 and 1, not {share}")
    if not values:
        return None
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    part = place - below
    return ordered[below] * (1 - part) + ordered[above] * part


def median(values: Sequence[float]) -> float | None:
    """Return the median; None if there are no values."""
    return percentile(values, 0.5)


def share_within(ratios: Sequence[float], tolerance: float) -> float | None:
    """Return the share of `ratios` that are 1 give or take `tolerance`; None if there are none.

    Too quick counts as too slow does: both are wrong.
    """
    if not ratios:
        return None
    # A ratio of exactly 1.05 is within 5%, whatever its last bit is.
    slack = tolerance + 1e-9
    return sum(abs(ratio - 1) <= slack for ratio in ratios) / len(ratios)


def relative_difference(first: float, second: float) -> float:
    """Return by how much of the smaller one two positive numbers differ."""
    low, high = sorted((first, second))
    return high / low - 1
