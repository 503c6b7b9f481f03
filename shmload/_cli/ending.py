"""Ends a command that SIGTERM or SIGHUP asks to end as Ctrl-C does: it leaves nothing behind."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import click

_ENDING = (signal.SIGTERM, signal.SIGHUP)
# Then the process ends whatever it does: imports of the libraries may swallow an exception.
_PATIENCE_S = 10.0

_ended_by: signal.Signals | None = None


class EndedBySignal(KeyboardInterrupt):
    """A signal asked the process to end.

    A `KeyboardInterrupt`, since a load that waits holds that back until its parts are removed.
    """


class EndingCommand(click.Command):
    """A command that removes its parts when a signal ends it."""

    def invoke(self, ctx: click.Context) -> Any:  # click's own signature
        with _ending_by_signals():
            return super().invoke(ctx)


@contextlib.contextmanager
def _ending_by_signals() -> Iterator[None]:
    """Raise `EndedBySignal` in the main thread when a signal asks this process to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # One that is ignored stays so, as under nohup(1).
    handled = [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> None:
    global _ended_by  # of the process, as its signals are
    _ended_by = signal.Signals(number)
    for each in _ENDING:
        if signal.getsignal(each) == _raise:
            signal.signal(each, signal.SIG_DFL)  # a second one ends it at once
    insisting = threading.Timer(_PATIENCE_S, os.kill, (os.getpid(), number))
    insisting.daemon = True
    insisting.start()
    raise EndedBySignal(_ended_by.name)


def end_as_signalled() -> None:
    """End this process by the signal that ended its command, if one did: its parent sees that."""
    if _ended_by is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    signal.signal(_ended_by, signal.SIG_DFL)
    os.kill(os.getpid(), _ended_by)
