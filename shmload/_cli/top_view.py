"""What `shmload top` shows, drawn by rich: functions of values alone.

    shmload  process 1234, up 2 h, 3 clients
    budget   ━━━━━━━━━━━━━━━━╺━━━━━━━━━━━━━  22.10 GiB of 40.00 GiB, room for 17.90 GiB in memory
    workers  4, decoding, 1 load waiting, 0 for room
    served   120 hits, 7 misses, 2 evictions, 0 refusals
    read     ▁▁▁▂▃▅▇█▇▅▃▁▁▁▁▁▁▁▁▁  1.93 GiB/s now, 35.20 GiB in all

      MODEL             DTYPE          SIZE  HIT  MISS  STATE
    > org/flux          bfloat16  22.10 GiB   12     3  ━━━━━━━━━━━━╺━━━━━━━  61% 1.93 GiB/s
      stable-diffusion  float16    2.10 GiB    9     1  4711 server.py  pinned

    up/down choose   p pin or unpin   e evict   q quit

Guarantee: every line fits the width, and what a model is called cannot move the cursor.
"""

import time
from collections.abc import Sequence

import msgspec
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shmload._cli.service import describe_status
from shmload._segments.grouping import Model
from shmload._segments.models import Models, UnfinishedModel
from shmload._segments.users import name_users
from shmload._service.protocol import ModelUse, Status
from shmload._wording import format_age, format_nbytes, printing

_KEYS = "up/down choose   p pin or unpin   e evict   q quit"
# Lines of the head where a service answers, and of what is around the rows: titles, foot, and an
# empty line.
_HEAD_HEIGHT, _REST_HEIGHT = 4, 4
_LEAST_NAME_WIDTH = 14


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A model: resident, being decoded, or both."""

    id: str
    """Tells it apart as long as its source and dtype are the same."""
    name: str
    dtype: str
    nbytes: int
    """Size of its segments, those in the making included, in bytes."""
    hits: int = 0
    misses: int = 0
    users: str = ""
    """The processes that use it; empty if there are none."""
    idle_s: float = 0.0
    """How long ago it was last used, in seconds."""
    is_pinned: bool = False
    model_id: str = ""
    """As `Model.id`; empty if it is not resident yet."""
    done: float | None = None
    """How much is decoded, from 0 to 1, if it is being decoded."""
    bytes_per_s: float = 0.0
    """How fast it is being decoded."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at one time."""

    status: Status | None
    """None while no service answers."""
    rows: tuple[Row, ...]
    trouble: str = ""
    """Why no service answers."""


def make_rows(found: Models, status: Status | None) -> tuple[Row, ...]:
    """Return a row for each model that is resident or being decoded; the latter first.

    Args:
        found: what is resident and what is being decoded, as /dev/shm says.
        status: what the service says of it.
    """
    counts = {(use.source, use.variant): use for use in status.models} if status else {}
    rows: dict[str, Row] = {}
    current: dict[str, str] = {}
    for model in found:
        rows[model.id] = _row_of(model, counts.get((model.source, model.variant)))
        if model.is_current:
            current[rows[model.id].id] = model.id
    for each in found.decoding:
        its = each.source, each.variant
        row = _row_of(each, counts.get(its))
        key = current.get(row.id, row.id)
        rows[key] = _with_decode(rows.get(key, row), each)
    return tuple(sorted(rows.values(), key=lambda row: (row.done is None, row.name, row.dtype)))


def _row_of(found: Model | UnfinishedModel, use: ModelUse | None) -> Row:
    row = Row(
        id=f"{found.source} {found.variant} {found.dtype}",
        name=found.name,
        dtype=found.dtype,
        nbytes=0,
        hits=use.hits if use else 0,
        misses=use.misses if use else 0,
    )
    if isinstance(found, UnfinishedModel):
        return row
    return msgspec.structs.replace(
        row,
        name=found.name if found.is_current else f"{found.name} (changed)",
        nbytes=found.nbytes,
        users=name_users(found.used_by) or ("unknown" if found.is_leased else ""),
        idle_s=time.time() - found.used_at,
        is_pinned=found.is_pinned,
        model_id=found.id,
    )


def _with_decode(row: Row, found: UnfinishedModel) -> Row:
    """Return a model's row while some of its segments are being decoded."""
    return msgspec.structs.replace(
        row,
        nbytes=row.nbytes + found.nbytes,
        done=found.done_nbytes / found.nbytes if found.nbytes else 0.0,
        bytes_per_s=found.bytes_per_s,
    )


def compose(
    snapshot: Snapshot, chosen: int, question: str, message: str, console: Console
) -> RenderableType:
    """Return what fills a console.

    Args:
        snapshot: what is known.
        chosen: the place of the row that is chosen.
        question: asked of the user, who answers with y or n; empty if nothing is asked.
        message: what the last order came to.
        console: to draw for.
    """
    width, height = console.size
    ascii_only = console.options.ascii_only
    trouble = Text(printing(snapshot.trouble), "yellow")
    head: RenderableType = trouble
    head_height = len(trouble.wrap(console, width))
    if snapshot.status:
        head = _head(snapshot.status)
        head_height = _HEAD_HEIGHT
    room = height - head_height - _REST_HEIGHT
    above = [head, Text()]
    if room < 1:  # a very low terminal: the models are worth more than the sums
        above, room = [], max(1, height - _REST_HEIGHT + 1)
    first = max(0, min(chosen - room // 2, len(snapshot.rows) - room))
    rows = _table(snapshot.rows[first : first + room], chosen - first, ascii_only)
    foot = [_line((message, "bold")), _line((_KEYS, "dim"))]
    if question:
        foot = [Text(), _line((f"{question} y/n", "yellow"))]
    return Group(*above, rows, *foot)


def _head(status: Status) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    said = describe_status(status)
    used = status.resident_nbytes / status.budget_nbytes if status.budget_nbytes else 1.0
    resident, budget = map(format_nbytes, (status.resident_nbytes, status.budget_nbytes))
    room = f"{resident} of {budget}, room for {format_nbytes(status.room_nbytes)} in memory"
    for label, shown in (
        ("shmload", said["service"]),
        ("budget", _bar(used, 30, "yellow" if used > 0.9 else "green", room)),
        ("waiting", said["waiting"]),
        ("served", said["served"]),
    ):
        grid.add_row(label, _line(shown) if isinstance(shown, str) else shown)
    return grid


def _bar(share: float, width: int, style: str, text: str) -> Table:
    """Return a bar that is filled by a share from 0 to 1, and a text beside it."""
    bar = ProgressBar(1.0, share, width, complete_style=style, finished_style=style)
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(no_wrap=True)
    grid.add_row(bar, _line(text))
    return grid


def _table(rows: Sequence[Row], chosen: int, ascii_only: bool) -> RenderableType:
    """Return the rows of models, one line each; `chosen` counts from the first of these."""
    if not rows:
        return _line(("  no model is resident", "dim"))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("  MODEL", "DTYPE", "SIZE", "HIT", "MISS", "STATE"):
        # Names and states give way where the terminal is narrow.
        gives_way = title in ("  MODEL", "STATE")
        is_number = title in ("SIZE", "HIT", "MISS")
        justify: JustifyMethod = "right" if is_number else "left"
        least = _LEAST_NAME_WIDTH if title == "  MODEL" else None
        table.add_column(title, justify=justify, no_wrap=not gives_way, min_width=least)
    for place, row in enumerate(rows):
        name = f"{'> ' if place == chosen else '  '}{printing(row.name)}"
        numbers = format_nbytes(row.nbytes), str(row.hits), str(row.misses)
        shown = Text(name, no_wrap=True, overflow="crop" if ascii_only else "ellipsis")
        style = "reverse" if place == chosen else ""
        table.add_row(shown, row.dtype or "-", *numbers, _state(row), style=style)
    return table


def _state(row: Row) -> RenderableType:
    """Return what a model is doing: its decode, its users, or how long nothing used it."""
    if row.done is not None:
        return _bar(row.done, 20, "green", f"{row.done:4.0%} {format_nbytes(row.bytes_per_s)}/s")
    what = (row.users, "green") if row.users else (f"idle {format_age(row.idle_s)}", "dim")
    return _line(what, ("  pinned" if row.is_pinned else "", "yellow"))


def _line(*parts: str | tuple[str, str]) -> Text:
    """Return a line of texts, each with its style; its end goes where there is no room."""
    line = Text(no_wrap=True, overflow="crop")
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        line.append(printing(text), style)
    return line
