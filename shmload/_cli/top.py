"""The command `shmload top`: a screen on a terminal, lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable

import click

from shmload._cli.output import say
from shmload._cli.service import describe_status
from shmload._cli.top_feed import Feed, rate_between
from shmload._cli.top_view import Row, Snapshot, View, chosen_index, compose
from shmload._segments.pins import pin, unpin
from shmload._segments.upkeep import evict
from shmload._service.client import Client
from shmload._service.endpoint import socket_path
from shmload._service.protocol import GetStatus, Status
from shmload._wording import format_nbytes
from shmload.errors import SegmentBusy

_INTERVAL_S = 1.0


@click.command("top")
def top_command() -> None:
    """Watch the running service: models, workers, throughput, the budget.

    On a terminal, keys choose a model to pin, unpin or evict; q ends. Elsewhere, prints the status
    every second until Ctrl-C.
    """
    Client(socket_path()).close()  # without a service, say so and end
    if sys.stdin.isatty() and sys.stdout.isatty():
        try:
            # Some Pythons are built without curses.
            from shmload._cli.top_screen import ScreenUnusable
        except ImportError:
            pass
        else:
            with contextlib.suppress(ScreenUnusable):
                _watch()
                return
    with contextlib.suppress(KeyboardInterrupt):
        _print_lines()


def _print_lines() -> None:
    before: Status | None = None
    with Client(socket_path()) as client:
        while True:
            found = client.ask(GetStatus(), Status)
            lines = list(describe_status(found))
            if before:
                lines.append(f"now        {format_nbytes(rate_between(before, found))}/s read")
            say(*lines)
            before = found
            time.sleep(_INTERVAL_S)


def _watch() -> None:
    from shmload._cli.top_screen import News, open_screen

    with (
        contextlib.closing(News()) as news,
        open_screen(news) as screen,
        Feed(socket_path(), news.tell) as feed,
    ):
        desk = Desk(feed.order)
        while not screen.is_ending:
            message, snapshot = feed.message, feed.latest  # in this order
            screen.draw(compose(snapshot, desk.view(message), *screen.size, screen.charset))
            for key in screen.pressed():
                if key == "q" and not desk.is_asking:
                    return
                feed.message = ""
                desk.press(key, snapshot)


class Desk:
    """What keys mean: which model is chosen, what is asked, what is ordered.

    Args:
        order: has something done; what it returns is said to the user.
    """

    def __init__(self, order: Callable[[Callable[[], str]], None]) -> None:
        self._order = order
        self._chosen, self._place = "", 0
        self._asked: Row | None = None

    @property
    def is_asking(self) -> bool:
        """Whether the next key answers a question."""
        return self._asked is not None

    def view(self, message: str) -> View:
        """Return what is to be shown.

        Args:
            message: what the last order came to.
        """
        asked = self._asked
        question = _question(asked) if asked else ""
        return View(chosen=self._chosen, place=self._place, question=question, message=message)

    def press(self, key: str, snapshot: Snapshot) -> None:
        """Take a key that was pressed while a snapshot was shown."""
        asked, self._asked = self._asked, None
        if asked:
            if key in "yY":
                self._order(lambda: _evict(asked))
            return
        rows = snapshot.rows
        if not rows:
            return
        place = chosen_index(rows, self.view(""))
        if key in ("up", "down"):
            place = min(max(place + (-1 if key == "up" else 1), 0), len(rows) - 1)
        row = rows[place]
        self._chosen, self._place = row.id, place
        if row.model_id and key == "p":
            self._order(lambda: _pin_or_unpin(row))
        elif row.model_id and key == "e":
            self._asked = row


def _title(row: Row) -> str:
    return f"{row.name} ({row.dtype})" if row.dtype else row.name


def _question(asked: Row) -> str:
    """Ask whether a model is to go: with its dtype, since one name may have several."""
    pinned = ", which is pinned" if asked.is_pinned else ""
    return f"evict {_title(asked)}, {format_nbytes(asked.nbytes)}{pinned}?"


def _evict(row: Row) -> str:
    try:
        removed = evict(row.model_id)
    except SegmentBusy:
        return f"{row.name} is in use by {row.users or 'some process'}; end that process first"
    return (
        f"evicted {row.name} ({row.dtype}): {format_nbytes(sum(info.nbytes for info in removed))}"
    )


def _pin_or_unpin(row: Row) -> str:
    if row.is_pinned:
        unpin(row.model_id)
        return f"unpinned {_title(row)}"
    pin(row.model_id)
    return f"pinned {_title(row)}"
