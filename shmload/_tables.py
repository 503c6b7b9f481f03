"""Tables for people: one writer, as text for terminals and as HTML for notebooks.

Guarantee: what a file or a process is called cannot change the table around it. Characters that do
not print are escaped in text, and so are those that mean something in HTML.
"""

import html
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from shmload._wording import printing

_STYLES = {"bold": "\x1b[1m", "green": "\x1b[32m", "yellow": "\x1b[33m", "dim": "\x1b[2m"}
_RESET = "\x1b[0m"
_GAP = "  "
# Of a column that is cut to fit: what most names need, and what tells anything at all.
_READABLE_WIDTH = 30
_LEAST_WIDTH = 12


class Cell(NamedTuple):
    """A cell with a style, or with a shorter text for narrow terminals."""

    text: str
    style: str = ""
    """`bold`, `green`, `yellow`, `dim` or empty; shown on terminals only."""
    short: str = ""
    """What may stand there instead where the table is too wide; empty if nothing."""


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """A table with a line of titles."""

    titles: tuple[str, ...]
    rows: Sequence[Sequence[str | Cell]]
    right: tuple[int, ...] = ()
    """Columns of numbers, which end at the right."""
    cut: int | None = None
    """The column whose texts lose their beginning if the table is still too wide."""

    drop: tuple[int, ...] = ()
    """Columns that are left out if it is too wide even with the beginnings of folders cut."""

    def lines(self, width: int | None = None, *, color: bool = False) -> Iterator[str]:
        """Yield its lines.

        Args:
            width: of the terminal, in characters; None for no limit.
            color: use the styles, as escape sequences of terminals.
        """
        columns, texts = self._fit(width)
        rows = [[_as_cell(row[column]) for column in columns] for row in self.rows]
        titles = [self.titles[column] for column in columns]
        widths = _widths([titles, *texts])
        right = [column in self.right for column in columns]
        yield _line(titles, widths, right, ["bold" if color else ""] * len(widths))
        for cells, row in zip(rows, texts, strict=True):
            yield _line(row, widths, right, [cell.style if color else "" for cell in cells])

    def html(self) -> str:
        """Return it as an HTML table."""
        head = "".join(self._html_cell("th", n, title) for n, title in enumerate(self.titles))
        body = "".join(
            "<tr>"
            + "".join(self._html_cell("td", n, _as_cell(cell).text) for n, cell in enumerate(row))
            + "</tr>"
            for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _html_cell(self, tag: str, column: int, text: str) -> str:
        side = "right" if column in self.right else "left"
        return f'<{tag} style="text-align: {side}">{html.escape(printing(text))}</{tag}>'

    def _fit(self, width: int | None) -> tuple[list[int], list[list[str]]]:
        """Return the columns that are shown and their texts, shortened as the width demands."""
        columns = list(range(len(self.titles)))
        cells = [[_as_cell(cell) for cell in row] for row in self.rows]
        texts = [[cell.text for cell in row] for row in cells]
        if width is None:
            return columns, texts
        # The last column first: what has a short form says the same in fewer words.
        for column in reversed(columns):
            if self._excess(columns, texts, width) > 0:
                for row, own in zip(texts, cells, strict=True):
                    row[column] = own[column].short or row[column]
        self._cut(columns, texts, width, least=_READABLE_WIDTH)
        if self._excess(columns, texts, width) > 0:
            columns = [column for column in columns if column not in self.drop]
            texts = [[row[column] for column in columns] for row in texts]
            self._cut(columns, texts, width, least=_LEAST_WIDTH)
        return columns, texts

    def _cut(self, columns: list[int], texts: list[list[str]], width: int, *, least: int) -> None:
        """Cut the column of names, as far as the width demands it but not below the least."""
        excess = self._excess(columns, texts, width)
        if excess > 0 and self.cut is not None:
            place = columns.index(self.cut)
            widest = max((len(printing(row[place])) for row in texts), default=0)
            for row in texts:
                row[place] = _without_beginning(row[place], max(least, widest - excess))

    def _excess(self, columns: list[int], texts: list[list[str]], width: int) -> int:
        """Return how much too wide the columns are, in characters."""
        widths = _widths([[self.titles[column] for column in columns], *texts])
        return sum(widths) + len(_GAP) * (len(widths) - 1) - width


class Page(NamedTuple):
    """Tables and lines of text, one below the other."""

    blocks: tuple[Table | str, ...]

    def text(self, width: int | None = None, *, color: bool = False) -> str:
        """Return the page as text, without a newline at its end; arguments as for a table."""
        lines: list[str] = []
        for block in self.blocks:
            match block:
                case Table():
                    lines += block.lines(width, color=color)
                case str():
                    lines += map(printing, block.split("\n"))
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


def _as_cell(cell: str | Cell) -> Cell:
    return cell if isinstance(cell, Cell) else Cell(cell)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(len(printing(text)) for text in column) for column in zip(*rows, strict=True)]


def _line(
    row: Sequence[str], widths: Sequence[int], right: Sequence[bool], styles: Sequence[str]
) -> str:
    cells: list[str] = []
    for text, width, is_right, style in zip(row, widths, right, styles, strict=True):
        shown = printing(text)
        padded = shown.rjust(width) if is_right else shown.ljust(width)
        if len(cells) == len(widths) - 1:
            padded = padded.rstrip()
        cells.append(f"{_STYLES[style]}{padded}{_RESET}" if style else padded)
    return _GAP.join(cells).rstrip()


def _without_beginning(text: str, room: int) -> str:
    """Cut a text to a number of characters; between two folders, if that costs few of them."""
    if len(text) <= room:
        return text
    end = text[1 - room :]
    folder = end.find("/")
    return "…" + (end[folder:] if 0 <= folder <= room // 2 else end)
