"""What `shmload top` shows, as lines of styled text: functions of values alone.

    shmload   process 1234, up 2 h, 3 clients
    budget    ██████░░░░░░  22.10 GiB of 40.00 GiB, room for 17.90 GiB in memory
    workers   4, decoding, 1 load waiting, 0 for room
    served    120 hits, 7 misses, 2 evictions, 0 refusals
    read      ▁▁▁▂▃▅▇█▇▅▃▁▁▁▁▁▁▁▁▁  1.93 GiB/s now, 35.20 GiB in all

      MODEL              DTYPE          SIZE  HIT  MISS  STATE
    > org/flux           bfloat16  22.10 GiB   12     3  ██████░░░░  61% 1.93 GiB/s
      stable-diffusion   float16    2.10 GiB    9     1  4711 server.py  pinned

    up/down choose   p pin or unpin   e evict   q quit

Guarantee: every line fits the width, and what a model is called cannot move the cursor.
"""

import textwrap
from collections.abc import Iterator, Sequence

import msgspec

from shmload._cli.drawing import Charset, Line, Span, bar, cells_of, clip, cut, pad, sparkline
from shmload._service.protocol import Status
from shmload._wording import count_of, format_age, format_nbytes, printing

_LABEL_WIDTH = 10
_LEAST_NAME_WIDTH = 12
_LEAST_STATE_WIDTH = 22
_GAP = "  "
_KEYS = "up/down choose   p pin or unpin   e evict   q quit"


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
    is_waiting: bool = False
    """Whether its decode waits for the workers."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What is known at one time."""

    status: Status | None
    """None while no service answers."""
    rows: tuple[Row, ...]
    bytes_per_s: float = 0.0
    """How fast weights are being read now."""
    trouble: str = ""
    """Why no service answers."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has chosen, and what is to be said."""

    chosen: str = ""
    """The id of the chosen row."""
    place: int = 0
    """Where it was when it was chosen: if it has gone, the row that is there now is chosen."""
    question: str = ""
    """Asked of the user; answered with y or n."""
    message: str = ""
    """The outcome of the last key."""


def chosen_index(rows: Sequence[Row], view: View) -> int:
    """Return the place of the chosen row."""
    last = max(0, len(rows) - 1)
    found = (place for place, row in enumerate(rows) if row.id == view.chosen)
    return next(found, min(view.place, last))


def compose(
    snapshot: Snapshot, view: View, width: int, height: int, charset: Charset
) -> list[Line]:
    """Return the lines of the screen, at most `height` of at most `width` cells each."""
    head = [] if snapshot.status is None else list(_head(snapshot, snapshot.status, width, charset))
    if snapshot.trouble:
        trouble = textwrap.wrap(snapshot.trouble, max(1, width))
        head += [(Span(line, "warn"),) for line in trouble]
    head.append(())
    foot = _foot(view)
    room = height - len(head) - 1 - len(foot)
    if room < 1:  # a very low terminal: the models are worth more than the sums
        head, room = [], max(1, height - 1 - len(foot))
    table = list(_table(snapshot.rows, view, width, room, charset))
    filling = [()] * max(0, height - len(head) - len(table) - len(foot))
    return [clip(line, width, charset) for line in [*head, *table, *filling, *foot]][:height]


def _head(snapshot: Snapshot, status: Status, width: int, charset: Charset) -> Iterator[Line]:
    up = format_age(status.uptime_s)
    yield _labelled(
        "shmload", f"process {status.pid}, up {up}, {count_of(status.clients, 'client')}"
    )
    used = status.resident_nbytes / status.budget_nbytes if status.budget_nbytes else 1.0
    amount = f"{format_nbytes(status.resident_nbytes)} of {format_nbytes(status.budget_nbytes)}"
    room = f"room for {format_nbytes(status.room_nbytes)} in memory"
    bar_width = max(5, min(30, width - _LABEL_WIDTH - len(amount) - len(room) - 6))
    yield (
        Span("budget".ljust(_LABEL_WIDTH), "dim"),
        Span(bar(used, bar_width, charset), "warn" if used > 0.9 else "good"),
        Span(f"  {amount}, {room}"),
    )
    state = "decoding" if status.is_decoding else "idle"
    waiting = f"{count_of(status.waiting, 'load')} waiting, {status.waiting_for_room} for room"
    yield _labelled("workers", f"{status.workers}, {state}, {waiting}")
    served = (
        f"{count_of(status.hits, 'hit')}, {count_of(status.misses, 'miss', 'misses')}, "
        f"{count_of(status.evictions, 'eviction')}, {count_of(status.refusals, 'refusal')}"
    )
    yield _labelled("served", served)
    text = (
        f"  {format_nbytes(snapshot.bytes_per_s)}/s now, {format_nbytes(status.read_nbytes)} in all"
    )
    yield (
        Span("read".ljust(_LABEL_WIDTH), "dim"),
        Span(sparkline(status.history, width - _LABEL_WIDTH - len(text), charset), "good"),
        Span(text),
    )


def _labelled(label: str, text: str) -> Line:
    return Span(label.ljust(_LABEL_WIDTH), "dim"), Span(text)


def _foot(view: View) -> list[Line]:
    if view.question:
        return [(), (Span(f"{view.question} y/n", "warn"),)]
    return [(Span(view.message, "bold"),), (Span(_KEYS, "dim"),)]


def _table(
    rows: Sequence[Row], view: View, width: int, room: int, charset: Charset
) -> Iterator[Line]:
    """Yield the titles and as many rows as there is room for, among them the chosen one."""
    titles = ("MODEL", "DTYPE", "SIZE", "HIT", "MISS")
    if not rows:
        yield (Span("  no model is resident", "dim"),)
        return
    first = max(0, min(chosen_index(rows, view) - room // 2, len(rows) - room))
    shown = rows[first : first + room]
    cells = [_cells(row) for row in shown]
    columns = list(zip(titles, *cells, strict=True))
    names, *sizes = (max(map(cells_of, column)) for column in columns)
    taken = 2 + sum(sizes) + len(_GAP) * 5
    name_width = max(_LEAST_NAME_WIDTH, min(names, width - taken - _LEAST_STATE_WIDTH))
    state_width = width - taken - name_width
    yield (Span(f"  {_join(titles, name_width, sizes, charset)}{_GAP}STATE", "bold"),)
    for place, (row, texts) in enumerate(zip(shown, cells, strict=True), first):
        is_chosen = place == chosen_index(rows, view)
        line = _join(texts, name_width, sizes, charset)
        yield (
            Span("> " if is_chosen else "  "),
            Span(line, "chosen" if is_chosen else ""),
            Span(_GAP),
            *_state(row, state_width, charset),
        )


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    return (
        printing(row.name),
        row.dtype or "-",
        format_nbytes(row.nbytes),
        str(row.hits),
        str(row.misses),
    )


def _join(texts: Sequence[str], name_width: int, sizes: Sequence[int], charset: Charset) -> str:
    name, dtype, *numbers = texts
    shown = [pad(cut(name, name_width, charset), name_width), dtype.ljust(sizes[0])]
    shown += [number.rjust(size) for number, size in zip(numbers, sizes[1:], strict=True)]
    return _GAP.join(shown)


def _state(row: Row, width: int, charset: Charset) -> Iterator[Span]:
    """Yield what a model is doing: its decode, its users, or how long nothing used it."""
    pinned = "pinned" if row.is_pinned else ""
    if row.is_waiting:
        yield Span("waiting", "warn")
    elif row.done is not None:
        text = f" {row.done:4.0%} {format_nbytes(row.bytes_per_s)}/s"
        yield Span(bar(row.done, max(3, min(20, width - len(text))), charset), "good")
        yield Span(text)
    elif row.users:
        yield Span(printing(row.users), "good")
        yield Span(f"  {pinned}" if pinned else "", "warn")
    else:
        yield Span(f"idle {format_age(row.idle_s)}", "dim")
        yield Span(f"  {pinned}" if pinned else "", "warn")
