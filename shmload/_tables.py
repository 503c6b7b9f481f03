"""Tables for people: one writer, as text for programs and pipes and as HTML for notebooks.

Guarantee: what a file or a process is called cannot change the table around it. Characters that do
not print are escaped in text, and so are those that mean something in HTML.
"""

import html
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from shmload._wording import printing

_GAP = "  "


class Cell(NamedTuple):
    """A cell with a style."""

    text: str
    style: str = ""
    """`bold`, `green`, `yellow`, `dim` or empty; shown on terminals only."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table with a line of titles."""

    titles: tuple[str, ...]
    rows: Sequence[Sequence[str | Cell]]
    right: tuple[int, ...] = ()
    """Columns of numbers, which end at the right."""

    def cells(self) -> list[list[Cell]]:
        """Return its rows; what does not print in their texts is escaped."""
        rows = [
            [Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows
        ]
        return [[Cell(printing(cell.text), cell.style) for cell in row] for row in rows]

    def lines(self) -> Iterator[str]:
        """Yield its lines, as wide as they are and without styles."""
        rows = [list(self.titles), *([cell.text for cell in row] for row in self.cells())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            padded = [
                text.rjust(width) if column in self.right else text.ljust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield _GAP.join(padded).rstrip()

    def html(self) -> str:
        """Return it as an HTML table."""
        head = self._html_row("th", self.titles)
        body = "".join(self._html_row("td", [cell.text for cell in row]) for row in self.cells())
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"

    def _html_row(self, tag: str, texts: Sequence[str]) -> str:
        sides = ("right" if column in self.right else "left" for column in range(len(texts)))
        cells = (
            f'<{tag} style="text-align: {side}">{html.escape(text)}</{tag}>'
            for side, text in zip(sides, texts, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"


class Page(NamedTuple):
    """Tables and lines of text, one below the other."""

    blocks: tuple[Table | str, ...]

    def text(self) -> str:
        """Return the page as text, without a newline at its end."""
        lines: list[str] = []
        for block in self.blocks:
            lines += block.lines() if isinstance(block, Table) else map(printing, block.split("\n"))
        return "\n".join(lines)

    def html(self) -> str:
        """Return the page as HTML."""
        return "".join(
            block.html() if isinstance(block, Table) else f"<pre>{html.escape(block)}</pre>"
            for block in self.blocks
            if block
        )


class Printable:
    """A value that is printed as a page, and shown as one in a notebook."""

    __slots__ = ()

    def page(self) -> Page:
        """Return what the command line prints."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.page().text()

    def _repr_html_(self) -> str:
        return self.page().html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the page in a plain IPython, which would show the `repr`."""
        printer.text(str(self))


_Item = TypeVar("_Item")


class Listing(Printable, list[_Item]):
    """A list that is printed as a table.

    `Printable` comes first: IPython takes the first base with a way of its own, and has one for
    lists.
    """
