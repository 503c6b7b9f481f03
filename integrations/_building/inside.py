"""Tells whether a load is under way here: what is called meanwhile is the library's own.

`redirect` leaves such calls of `from_pretrained` alone, so its methods change nothing in a load.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

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


_behind: weakref.WeakKeyDictionary[Callable[..., Any], Any] = weakref.WeakKeyDictionary()


def put_in_front(function: Callable[..., Any], original: Any) -> None:
    """Note that a function calls another one, and does nothing else inside a load."""
    _behind[function] = original


def what_is_behind(function: Any) -> Any:
    """Return what a function calls inside a load: itself, or what it was put in front of."""
    try:
        return _behind.get(function, function)
    except TypeError:  # no weak reference to it is possible
        return function
