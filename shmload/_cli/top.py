"""The command `shmload top`: a screen on a terminal, lines elsewhere.

Guarantee: the terminal is restored however the command ends, short of SIGKILL: at q, Ctrl-C,
SIGTERM, SIGHUP and errors. The screen never waits for the service or for a removal, and a service
that ends or hangs is shown as that, and found again once it answers.
"""

import contextlib
import logging
import os
import queue
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

import click

from shmload._cli.output import say
from shmload._cli.service import status_lines
from shmload._segments.models import Models, models
from shmload._segments.upkeep import evict, pin, unpin
from shmload._service.client import Client
from shmload._service.endpoint import socket_path
from shmload._service.protocol import GetStatus, Status
from shmload._wording import format_nbytes
from shmload.errors import SegmentBusy, ShmloadError

if TYPE_CHECKING:
    from shmload._cli.top_view import Row, Snapshot

_INTERVAL_S = 1.0
# How soon a signal, a new size of the window and news of the service are shown; a key is at once.
_GLANCE_MS = 200
_JOIN_TIMEOUT_S = 2.0
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_KEYS = {"\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down"}
_KEY = re.compile(r"\x1b[\[O][0-9;]*.|.", re.DOTALL)

Order = Callable[[], str]
"""Does what a key means; returns what to say about it. May raise `ShmloadError`."""


@click.command("top")
def top_command() -> None:
    """Watch the running service: models, workers, throughput, the budget.

    On a terminal, keys choose a model to pin, unpin or evict; q ends. Elsewhere, prints the status
    every second until Ctrl-C.
    """
    Client(socket_path()).close()  # without a service, say so and end
    is_drawable = os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
    if is_drawable and sys.stdin.isatty() and sys.stdout.isatty():
        _watch()
    else:
        with contextlib.suppress(KeyboardInterrupt):
            _print_lines()


def _print_lines() -> None:
    with Client(socket_path()) as client:
        while True:
            found = client.ask(GetStatus(), Status)
            lines = status_lines(found)
            say(*lines)
            time.sleep(_INTERVAL_S)


# The screen ---------------------------------------------------------------------------------------


def _watch() -> None:
    from rich.console import (
        Console,
        ConsoleDimensions,
    )  # rich takes 50 ms, which no other command need wait for
    from rich.live import Live

    from shmload._cli.top_view import compose

    console = Console(highlight=False)
    with (
        _quiet_terminal() as ended,
        Live(console=console, screen=True, auto_refresh=False) as live,
        Feed() as feed,
    ):
        desk = Desk(feed.order)
        shown: object = None
        while not ended.is_set():
            width, height = os.get_terminal_size()  # rich would take COLUMNS and LINES, which stay
            console.size = ConsoleDimensions(width or 80, height or 24)
            message, snapshot = feed.message, feed.latest  # in this order
            place = desk.place_among(snapshot.rows)
            now = message, snapshot, place, desk.question, console.size
            if now != shown:
                live.update(compose(snapshot, place, desk.question, message, console), refresh=True)
                shown = now
            for key in _pressed(ended):
                if key == "q" and not desk.question:
                    return
                feed.message = ""
                desk.press(key, snapshot.rows)


@contextlib.contextmanager
def _quiet_terminal() -> Iterator[threading.Event]:
    """Have keys come one by one and unseen, and nothing logged; yield what a signal to end sets."""
    ended = threading.Event()
    with contextlib.ExitStack() as restoring:
        restoring.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup(1)
                before = signal.signal(number, lambda *_: ended.set())
                restoring.callback(signal.signal, number, before)
        restoring.callback(termios.tcsetattr, 0, termios.TCSADRAIN, termios.tcgetattr(0))
        tty.setcbreak(0)
        yield ended


def _pressed(ended: threading.Event) -> Iterator[str]:
    """Wait a moment for keys; yield their names: characters, `up` and `down`."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    if poll.poll(_GLANCE_MS):
        typed = b""
        with contextlib.suppress(OSError):
            typed = os.read(0, 1 << 10)
        if not typed:
            ended.set()  # the terminal has gone
        for key in _KEY.findall(typed.decode(errors="replace")):
            name = _KEYS.get(key, key)
            if len(name) == 1 or key in _KEYS:
                yield name


class Desk:
    """What keys mean: which model is chosen, what is asked, what is ordered.

    Args:
        order: has something done; what it returns is said to the user.
    """

    def __init__(self, order: Callable[[Order], None]) -> None:
        self._order = order
        self._chosen, self._place = "", 0
        self._asked: Row | None = None

    @property
    def question(self) -> str:
        """What is asked, to be answered with the next key; empty if nothing is.

        It has the model's dtype, since one name may have several.
        """
        if not self._asked:
            return ""
        pinned = ", which is pinned" if self._asked.is_pinned else ""
        return f"evict {_title(self._asked)}, {format_nbytes(self._asked.nbytes)}{pinned}?"

    def place_among(self, rows: "tuple[Row, ...]") -> int:
        """Return the place of the chosen row; if it has gone, the row that is there now."""
        found = (place for place, row in enumerate(rows) if row.id == self._chosen)
        return next(found, min(self._place, max(0, len(rows) - 1)))

    def press(self, key: str, rows: "tuple[Row, ...]") -> None:
        """Take a key that was pressed while some rows were shown."""
        asked, self._asked = self._asked, None
        if asked:
            if key in "yY":
                self._order(lambda: _evict(asked))
            return
        if not rows:
            return
        place = self.place_among(rows)
        if key in ("up", "down"):
            place = min(max(place + (-1 if key == "up" else 1), 0), len(rows) - 1)
        row = rows[place]
        self._chosen, self._place = row.id, place
        if row.model_id and key == "p":
            self._order(lambda: _pin_or_unpin(row))
        elif row.model_id and key == "e":
            self._asked = row


def _title(row: "Row") -> str:
    return f"{row.name} ({row.dtype})" if row.dtype else row.name


def _evict(row: "Row") -> str:
    try:
        removed = evict(row.model_id)
    except SegmentBusy:
        return f"{row.name} is in use by {row.users or 'some process'}; end that process first"
    return (
        f"evicted {row.name} ({row.dtype}): {format_nbytes(sum(info.nbytes for info in removed))}"
    )


def _pin_or_unpin(row: "Row") -> str:
    if row.is_pinned:
        unpin(row.model_id)
        return f"unpinned {_title(row)}"
    pin(row.model_id)
    return f"pinned {_title(row)}"


# What it shows ------------------------------------------------------------------------------------


class Feed:
    """Asks for what is shown, once a second and after each order, in a thread that it ends."""

    def __init__(self) -> None:
        from shmload._cli.top_view import Snapshot

        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._client: Client | None = None
        self.latest = Snapshot(status=None, rows=())
        """What was found last; replaced as a whole."""
        self.message = ""
        """What the last order came to. It comes after the snapshot that shows it, so read it first:
        else a key could be taken for what the order has changed already."""
        self._thread = threading.Thread(target=self._run, name="shmload-top", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)

    def order(self, order: Order) -> None:
        """Have something done soon; `message` then says what it came to."""
        self._orders.put(order)

    def _run(self) -> None:
        message: str | None = None
        while True:
            self.latest = self._look()
            if message is not None:
                self.message, message = message, None
            try:
                order = self._orders.get(timeout=_INTERVAL_S)
            except queue.Empty:
                continue
            if order is None:
                break
            try:
                message = order()
            except ShmloadError as exc:
                message = str(exc)
        if self._client:
            self._client.close()

    def _look(self) -> "Snapshot":
        from shmload._cli.top_view import Snapshot, make_rows

        found = Models()
        with contextlib.suppress(ShmloadError):
            found = models()
        try:
            if self._client is None:
                self._client = Client(socket_path())
            status = self._client.ask(GetStatus(), Status)
        except ShmloadError as exc:
            if self._client:
                self._client.close()
            self._client = None
            return Snapshot(status=None, rows=make_rows(found, None), trouble=str(exc))
        return Snapshot(status=status, rows=make_rows(found, status))
