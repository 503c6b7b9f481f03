"""The screen of `shmload top`: curses, from its start to the terminal as it was.

Guarantee: the terminal is restored however the program ends, short of SIGKILL: at q, Ctrl-C,
SIGTERM, SIGHUP and errors. A change of the window's size, a key and news are each shown at once.
"""

import contextlib
import curses
import locale
import logging
import os
import select
import signal
import sys
from collections.abc import Iterator

from shmload._cli.drawing import ASCII, BLOCKS, Charset, Line

# Nothing else wakes the screen if the thread that brings news has died.
_TIMEOUT_MS = 5000
# How long a terminal may take between the bytes of one key.
_ESCAPE_DELAY_MS = 50
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_COLORS = {"good": curses.COLOR_GREEN, "warn": curses.COLOR_YELLOW}
_KEYS = {
    curses.KEY_UP: "up",
    ord("k"): "up",
    curses.KEY_DOWN: "down",
    ord("j"): "down",
}


class ScreenUnusable(Exception):
    """The terminal cannot be drawn on."""


class Screen:
    """A terminal in use for drawing lines and reading keys; made by `open_screen`.

    Args:
        window: the whole terminal.
        news: a descriptor that becomes readable when there is something to look at.
    """

    def __init__(self, window: curses.window, news: int) -> None:
        self._window = window
        self._news = news
        self.is_ending = False
        """Whether a signal has asked for the end."""
        window.nodelay(True)
        window.keypad(True)
        with contextlib.suppress(curses.error):  # a terminal that cannot hide its cursor
            curses.curs_set(0)
        # An attribute of curses for each style of a span.
        self._styles = {"bold": curses.A_BOLD, "dim": curses.A_DIM, "chosen": curses.A_REVERSE}
        if curses.has_colors() and not os.environ.get("NO_COLOR"):
            curses.use_default_colors()
            for pair, (style, color) in enumerate(_COLORS.items(), 1):
                curses.init_pair(pair, color, -1)
                self._styles[style] = curses.color_pair(pair)

    @property
    def charset(self) -> Charset:
        """The characters that the terminal's locale can show."""
        return BLOCKS if "utf" in locale.getencoding().lower() else ASCII

    @property
    def size(self) -> tuple[int, int]:
        """Its width and height, in cells."""
        height, width = self._window.getmaxyx()
        return width, height

    def draw(self, lines: list[Line]) -> None:
        """Show lines from the top; the terminal gets only what has changed."""
        _, height = self.size
        self._window.erase()
        for row, line in enumerate(lines[:height]):
            self._window.move(row, 0)
            for text, style in line:
                # The last cell of the last line cannot be left, which is an error once it is drawn.
                with contextlib.suppress(curses.error):
                    self._window.addstr(text, self._styles.get(style, curses.A_NORMAL))
        self._window.refresh()

    def pressed(self) -> Iterator[str]:
        """Wait for a key, news, a signal or a new size; yield the names of the keys pressed.

        Names are characters, `up` and `down`.
        """
        poll = select.poll()
        poll.register(sys.stdin, select.POLLIN)
        poll.register(self._news, select.POLLIN)
        events = dict(poll.poll(_TIMEOUT_MS))
        if self._news in events:
            self._take_news(os.read(self._news, 1 << 10))
        if events.get(sys.stdin.fileno(), 0) & (select.POLLHUP | select.POLLERR):
            self.is_ending = True  # the terminal has gone
            return
        while (key := self._window.getch()) != curses.ERR:
            name = _KEYS.get(key, chr(key) if 0 < key < 128 else "")
            if name:
                yield name

    def _take_news(self, news: bytes) -> None:
        """Look which signals came among the news; see `signal.set_wakeup_fd`."""
        if signal.SIGWINCH in news:
            with contextlib.suppress(OSError, curses.error):
                size = os.get_terminal_size(sys.stdout.fileno())
                curses.resizeterm(size.lines, size.columns)
                self._window.clear()
        if any(number in news for number in _ENDING):
            self.is_ending = True


class News:
    """A pipe that wakes the screen; a context that closes it."""

    def __init__(self) -> None:
        self.fd, self._sender = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def tell(self) -> None:
        """Wake the screen; from any thread."""
        with contextlib.suppress(BlockingIOError):  # it is awake already
            os.write(self._sender, b"\0")

    @contextlib.contextmanager
    def of_signals(self) -> Iterator[None]:
        """Let signals wake the screen, inside the block, instead of ending the process."""
        before = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (*_ENDING, signal.SIGWINCH)
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup(1)
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.fd)
        os.close(self._sender)


@contextlib.contextmanager
def open_screen(news: News) -> Iterator[Screen]:
    """Take the terminal, inside the block; nothing is logged there.

    Args:
        news: wakes the screen.

    Raises:
        ScreenUnusable: the terminal is unknown or cannot be drawn on.
    """
    locale.setlocale(locale.LC_ALL, "")
    _require_cursor()
    os.environ.setdefault("ESCDELAY", str(_ESCAPE_DELAY_MS))
    with news.of_signals(), _without_logging():
        window = curses.initscr()
        try:
            curses.noecho()
            curses.cbreak()
            with contextlib.suppress(curses.error):
                curses.start_color()
            yield Screen(window, news.fd)
        finally:
            with contextlib.suppress(curses.error):  # the terminal has gone
                curses.endwin()


def _require_cursor() -> None:
    try:
        curses.setupterm(os.environ.get("TERM", "unknown"), sys.stdout.fileno())
    except curses.error as exc:
        raise ScreenUnusable(str(exc)) from exc
    if not curses.tigetstr("cup"):
        raise ScreenUnusable("the terminal cannot move its cursor")


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
