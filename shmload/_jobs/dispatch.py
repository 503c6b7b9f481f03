"""Which item goes to which runner, which items are done again, and in which order they come out.

Plain values: no process and no clock. Guarantee: every item that is taken comes out exactly once,
as a result or as an error, whichever runners end; and no more than a window of items is held.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shmload.errors import ItemKilled

ATTEMPTS = 3
"""An item is given up when this many runners have ended while they worked on it."""


class Item(NamedTuple):
    """An item with its number; behind the function, what became of it."""

    number: int
    value: Any
    """The item itself; later what the function returned, or an `ItemError`."""


class Dispatch:
    """Hands items out, and collects what became of them.

    Args:
        items: with rising numbers. One is taken only when it is handed out. An error that they
            raise ends them.
        window: how many items may be held at a time, from being taken until they come out.
        is_ordered: whether they come out in the order of their numbers, or else as they are done.
    """

    def __init__(self, items: Iterator[Item], *, window: int, is_ordered: bool) -> None:
        self._items = items
        self._window = window
        self._is_ordered = is_ordered
        self._has_more = True
        self.error: Exception | None = None
        """The error that ended the items early."""
        self._again: deque[Item] = deque()
        """Items to hand out before new ones are taken."""
        self._given: defaultdict[int, deque[Item]] = defaultdict(deque)
        self._endings: defaultdict[int, list[str]] = defaultdict(list)
        self._order: deque[int] = deque()
        """Numbers of the items that are held, in the order in which they were taken."""
        self._outcomes: dict[int, Item] = {}

    @property
    def is_over(self) -> bool:
        """Whether every item has come out."""
        return not (self._has_more or self._order)

    def look(self) -> None:
        """Take the first item, to know whether there is any."""
        item = self._take()
        if item is not None:
            self._again.append(item)

    def give(self, runner: int, depth: int = 1) -> Item | None:
        """Return the next item for a runner; None if it has enough, or if there is none now.

        Args:
            runner: its place.
            depth: how many items are enough, counting the one that it works on.
        """
        given = self._given[runner]
        if len(given) >= depth:
            return None
        item = self._again.popleft() if self._again else self._take()
        if item is not None:
            given.append(item)
        return item

    def given(self, runner: int) -> Sequence[Item]:
        """Return the items that a runner has not answered; it works on the first of them."""
        return self._given[runner]

    def take_back(self, runner: int, value: Any) -> None:
        """Note what became of the last item of a runner, which could not be sent to it."""
        self._finish(self._given[runner].pop(), value)

    def answer(self, runner: int, value: Any) -> None:
        """Note what became of the item that a runner works on."""
        self._finish(self._given[runner].popleft(), value)

    def end(self, runner: int, how: str | None) -> None:
        """Note that a runner has ended: the items that it has not answered are done again.

        Args:
            runner: its place.
            how: such as `SIGKILL`; None if its item is not to blame.
        """
        given = self._given.pop(runner, deque())
        if given and how is not None:
            endings = self._endings[given[0].number]
            endings.append(how)
            if len(endings) == ATTEMPTS:
                item = given.popleft()
                self._finish(item, ItemKilled(item.number, item.value, endings))
        self._again.extendleft(reversed(given))

    def come_out(self) -> list[Item]:
        """Return what became of the items that may come out now."""
        found: list[Item] = []
        while self._order:
            number = self._order[0] if self._is_ordered else next(iter(self._outcomes), -1)
            if number not in self._outcomes:
                break
            found.append(self._outcomes.pop(number))
            self._order.remove(number)  # at the left end, or a window from it at most
        return found

    def _take(self) -> Item | None:
        if not self._has_more or len(self._order) >= self._window:
            return None
        try:
            item = next(self._items, None)
        except Exception as exc:  # the user's code can raise anything; taken items are done first
            item, self.error = None, exc
        if item is None:
            self._has_more = False
            return None
        self._order.append(item.number)
        return item

    def _finish(self, item: Item, value: Any) -> None:
        self._endings.pop(item.number, None)
        self._outcomes[item.number] = Item(item.number, value)
