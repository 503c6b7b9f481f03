"""Tables for people, drawn by rich: on a terminal as wide as that, elsewhere a line for each row.

Guarantee: what a file or a process is called cannot change the table around it. Characters that do
not print are escaped, and nothing in a name is markup.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from shmload._wording import printing

# rich takes 50 ms, which only what prints a table need wait for.
if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table as DrawnTable

# In letters: columns of such texts are never folded, and no column is folded to less than this. A
# table that needs more than a narrow terminal has is as wide as it must be.
_SHORT, _LEAST = 14, 10
# In columns: more than any row has.
_UNBOUNDED = 1 << 16


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

    def __rich__(self) -> "DrawnTable":
        """Draw it: texts of many words or letters take several lines where there is no room."""
        from rich.table import Table as DrawnTable
        from rich.text import Text

        drawn = DrawnTable(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        rows = [
            [Text(printing(text), style) for text, style in map(_as_cell, row)] for row in self.rows
        ]
        for column, title in enumerate(self.titles):
            drawn.add_column(
                title,
                justify="right" if column in self.right else "left",
                no_wrap=all(len(row[column]) <= _SHORT for row in rows),
                min_width=min(_LEAST, max((len(row[column]) for row in rows), default=0)),
                overflow="fold",
            )
        for row in rows:
            drawn.add_row(*row)
        return drawn


def _as_cell(given: str | Cell) -> Cell:
    return Cell(given) if isinstance(given, str) else given


class Page(NamedTuple):
    """Tables and lines of text, one below the other."""

    blocks: tuple[Table | str, ...]

    def __rich__(self) -> "Group":
        """Draw it; lines of text are whole, however narrow the terminal is."""
        from rich.console import Group
        from rich.text import Text

        return Group(
            *(
                Text("\n".join(map(printing, block.split("\n"))), no_wrap=True, overflow="ignore")
                if isinstance(block, str)
                else block
                for block in self.blocks
            )
        )

    def text(self, console: "Console | None" = None) -> str:
        """Return the page as text, without a newline at its end.

        Args:
            console: the terminal to draw it for; None for a line for each row, without styles.
        """
        from rich.console import Console

        if console is None:
            # Without a height rich looks for a terminal, and takes a dumb one's width.
            console = Console(width=_UNBOUNDED, height=1, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            console.print(self, crop=False)
        lines = captured.get().removesuffix("\n").split("\n")
        return "\n".join(line.rstrip() for line in lines)


class Printable:
    """A value that is printed as a page."""

    __slots__ = ()

    def page(self) -> Page:
        """Return what the command line prints."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.page().text()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the page in IPython and in notebooks, which would show the `repr`."""
        printer.text(str(self))


_Item = TypeVar("_Item")


class Listing(Printable, list[_Item]):
    """A list that is printed as a table.

    `Printable` comes first: IPython takes the first base with a way of its own, and has one for
    lists.
    """
