"""Text for a terminal: names made safe to print, and aligned tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

_NARROWEST = 8


def printable(text: str) -> str:
    """Return `text` with everything that could steer a terminal written as an escape.

    Control characters, line breaks, direction marks and undecodable bytes become ``\\n``,
    ``\\x1b``, ``\\u202e`` and the like; a backslash is doubled, so that two different names never
    look the same.
    """
    return "".join(
        "\\\\" if char == "\\" else char if char.isprintable() else _escape(char) for char in text
    )


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode("ascii")


def one_line(text: str) -> str:
    """Return `text` as one safe line, keeping backslashes as they are (for messages)."""
    return "".join(char if char.isprintable() else _escape(char) for char in text.strip())


def display_width(text: str) -> int:
    """Return how many terminal columns `text` takes (East Asian wide characters take two)."""
    if text.isascii():
        return len(text)
    import unicodedata

    width = 0
    for char in text:
        if unicodedata.combining(char):
            continue
        width += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return width


def terminal_width() -> int | None:
    """Return the width of the terminal on standard output in columns, or None for a file or pipe.

    ``COLUMNS`` overrides it, as elsewhere.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isascii() and columns.isdigit() and int(columns) > 0:
        return int(columns)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None
) -> list[str]:
    """Return the lines of an aligned table.

    With `width` (in columns), the widest columns are shortened until the table fits, a cut being
    shown by an ellipsis. Cells are printed as given: pass them through `printable` first.
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(display_width(line[index]) for line in lines) for index in range(len(header))]
    if width is not None:
        _shrink(widths, width)
    return [_join(line, widths) for line in lines]


def _shrink(widths: list[int], width: int) -> None:
    gaps = 2 * (len(widths) - 1)
    while sum(widths) + gaps > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for cell, width in zip(cells, widths, strict=True):
        shown = cut(cell, width)
        padded.append(shown + " " * (width - display_width(shown)))
    return "  ".join(padded).rstrip()


def cut(text: str, width: int) -> str:
    """Return `text`, shortened to `width` columns if it is wider; an ellipsis shows the cut."""
    if display_width(text) <= width:
        return text
    while text and display_width(text) > width - 1:
        text = text[:-1]
    return text + "…"
