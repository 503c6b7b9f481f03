"""Tells whether a load is under way here: what is called meanwhile is the library's own.

`redirect` leaves such calls of `from_pretrained` alone.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

Said = set[tuple[str, int, str]]
"""What the libraries have logged: names of loggers, levels, messages."""

_said: ContextVar[Said | None] = ContextVar("shmload_inside_a_load", default=None)


def is_inside() -> bool:
    """Tell whether this thread, or this asynchronous task, is in a load."""
    return _said.get() is not None


def said_here() -> Said:
    """Return what was logged while models were built in this load, for the load to add to."""
    said = _said.get()
    return set() if said is None else said


@contextlib.contextmanager
def inside() -> Iterator[Said]:
    """Mark a block as part of a load; yield what is logged while models are built in it."""
    said = said_here()
    token = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(token)
