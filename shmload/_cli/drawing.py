"""Pieces of text to draw on a terminal: bars, sparklines, lines that fit a number of cells.

Functions of values alone. A cell is what one letter takes; some characters take two, some none.
"""

import math
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from shmload._wording import printing


class Charset(NamedTuple):
    """The characters to draw with."""

    full: str
    """A cell of a bar that is filled."""
    empty: str
    levels: str
    """Heights of a sparkline, from nothing to full."""
    cut: str
    """Stands for what was cut off."""


BLOCKS = Charset("█", "░", "▁▂▃▄▅▆▇█", "…")
ASCII = Charset("#", ".", "_.-=*#", "~")
"""For terminals that show no other characters."""


class Span(NamedTuple):
    """A piece of a line."""

    text: str
    style: str = ""
    """`bold`, `dim`, `good`, `warn`, `chosen` or empty."""


Line = tuple[Span, ...]


def bar(share: float, width: int, charset: Charset) -> str:
    """Return a bar that is filled by a share from 0 to 1."""
    filled = round(width * min(1.0, max(0.0, share)))
    return charset.full * filled + charset.empty * (width - filled)


def sparkline(values: Sequence[int], width: int, charset: Charset) -> str:
    """Return the latest values as heights, the greatest of those shown as the full one."""
    shown = values[-max(1, width) :]
    greatest = max(shown, default=0)
    top = len(charset.levels) - 1
    return "".join(
        charset.levels[math.ceil(top * value / greatest) if greatest else 0] for value in shown
    )


def clip(line: Line, width: int, charset: Charset) -> Line:
    """Cut a line to a width, in cells; the end goes."""
    shown = []
    for text, style in line:
        safe = printing(text)
        if cells_of(safe) > width:
            safe = _first_cells(safe, width - 1) + charset.cut if width > 0 else ""
        shown.append(Span(safe, style))
        width -= cells_of(safe)
    return tuple(shown)


def cut(text: str, width: int, charset: Charset) -> str:
    """Cut a text to a width, in cells; the beginning goes, since the end of a path says most."""
    if cells_of(text) <= width:
        return text
    while cells_of(text) > width - 1:
        text = text[1:]
    return charset.cut + text


def pad(text: str, width: int) -> str:
    """Add spaces up to a width, in cells."""
    return text + " " * (width - cells_of(text))


def cells_of(text: str) -> int:
    """Return how many cells a text takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_cells_of_one, text))


def _cells_of_one(each: str) -> int:
    if unicodedata.combining(each) or unicodedata.category(each) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(each) in "WF" else 1


def _first_cells(text: str, width: int) -> str:
    while cells_of(text) > width:
        text = text[:-1]
    return text
