"""Turns: which thread uses which of several pipelines, and which may go for another.

Guarantee: a pipeline is used by one thread at a time, and is not given up meanwhile.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shmload._settings import settings
from shmload.errors import ArgumentError, SwitchTimeout

if TYPE_CHECKING:
    from shmload._building.device_copies import Brought

PRIVATE = ""
"""Stands for weights that lie in no segment."""


class Entry:
    """A pipeline that is loaded, or may be.

    Args:
        name: of it.
        find: returns the segments that its load attaches or makes, with their sizes in bytes;
            with True it downloads nothing.
        load: loads it.
    """

    def __init__(
        self, name: str, find: Callable[[bool], Mapping[str, int]], load: Callable[[], Any]
    ) -> None:
        self.name = name
        self.find = find
        self.load = load
        self.pipe: Any = None
        self.brought: Brought | None = None
        self.segments: Mapping[str, int] = {}
        self.is_known = False
        """Whether `segments` was looked up."""
        self.private_nbytes = 0
        """Of its weights that lie in no segment, when it was loaded last; in bytes."""

    @property
    def parts(self) -> dict[Hashable, int]:
        """What it takes on the host when it is loaded; entries may have segments in common."""
        parts: dict[Hashable, int] = {(PRIVATE, self.name): self.private_nbytes}
        return parts | dict(self.segments)


class Turns:
    """The turns of some pipelines.

    Args:
        entries: the pipelines.
    """

    def __init__(self, entries: Collection[Entry]) -> None:
        self._entries = entries
        self.changed = threading.Condition()
        """Held while the rest is read or changed; notified when a turn ends."""
        self._users: dict[str, int] = {}
        self._last_use: dict[str, float] = {entry.name: 0.0 for entry in entries}
        self._next: dict[str, Sequence[str]] = {}
        self.ended = 0
        """How many turns have ended."""
        self.is_closed = False
        self.waits = 0
        self.waited_s = 0.0

    @contextlib.contextmanager
    def take(self, entry: Entry, deadline: float, then: Sequence[str] = ()) -> Iterator[None]:
        """Wait until no other thread uses a pipeline, and use it in the block.

        Args:
            entry: it.
            deadline: of the wait, on the monotonic clock.
            then: the names of those that are used next.

        Raises:
            ArgumentError: this thread uses it already, or all is closed.
            SwitchTimeout: the time is over.
        """
        me = threading.get_ident()
        with self.changed:
            if self._users.get(entry.name) == me:
                raise ArgumentError(f"{entry.name} is used by this thread already")
            self._wait(entry, lambda: entry.name not in self._users, deadline)
            self._users[entry.name] = me
            self._next[entry.name] = list(then)
        try:
            yield
        finally:
            with self.changed:
                self._last_use[entry.name] = time.monotonic()
                del self._next[entry.name]
                self._end([entry.name])

    def is_used(self, entry: Entry) -> bool:
        """Tell whether a thread uses a pipeline."""
        return entry.name in self._users

    def wait_for_end(self, entry: Entry, seen: int, deadline: float) -> None:
        """Wait until a turn has ended, with that of one's own.

        Args:
            entry: one's own.
            seen: how many have ended before.
            deadline: on the monotonic clock.

        Raises:
            ArgumentError: all others are this thread's, or all is closed.
            SwitchTimeout: the time is over.
        """
        with self.changed:
            others = {name: user for name, user in self._users.items() if name != entry.name}
            if others and set(others.values()) == {threading.get_ident()}:
                used = ", ".join(sorted(others))
                raise ArgumentError(f"{entry.name} does not fit beside {used}, in use here")
            self._wait(entry, lambda: self.ended != seen, deadline)

    def close(self) -> None:
        """Have all who wait, and all who come, raise ArgumentError."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    def require_open(self, entry: Entry) -> None:
        """Check that it is not closed.

        Raises:
            ArgumentError: it is.
        """
        if self.is_closed:
            raise ArgumentError(f"{entry.name} is of a switcher that is closed")

    def order(self, entry: Entry | None = None) -> list[Entry]:
        """Return the pipelines that may go for another, the first to go first.

        Those are the ones that nobody uses, or that are not loaded.
        """
        with self.changed:
            coming = list(self._next.values())

            def key(each: Entry) -> tuple[int, float]:
                places = [names.index(each.name) for names in coming if each.name in names]
                return -min(places, default=len(self._entries)), self._last_use[each.name]

            return sorted(
                (
                    each
                    for each in self._entries
                    if each is not entry and (each.pipe is None or each.name not in self._users)
                ),
                key=key,
            )

    @contextlib.contextmanager
    def claim(self, entries: Collection[Entry]) -> Iterator[bool]:
        """Use loaded pipelines for this thread if nobody does; tell whether nobody does."""
        me = threading.get_ident()
        names = [each.name for each in entries if each.pipe is not None]
        with self.changed:
            are_free = self._users.keys().isdisjoint(names)
            if are_free:
                self._users |= dict.fromkeys(names, me)
        try:
            yield are_free
        finally:
            if are_free:
                with self.changed:
                    self._end(names)

    def _end(self, names: Collection[str]) -> None:
        for name in names:
            del self._users[name]
        self.ended += 1
        self.changed.notify_all()

    def _wait(self, entry: Entry, is_over: Callable[[], bool], deadline: float) -> None:
        """Wait until something is so, with `changed` held; raise as `take`."""
        if not is_over() and not self.is_closed:
            began = time.monotonic()
            self.waits += 1
            is_so = self.changed.wait_for(
                lambda: self.is_closed or is_over(), max(0.0, deadline - began)
            )
            self.waited_s += time.monotonic() - began
            if not is_so:
                used = self._users.keys() - {entry.name} or self._users
                raise SwitchTimeout(entry.name, settings().wait_timeout_s, used)
        self.require_open(entry)
