"""Which block takes which buffer of a device, and which block is likely to compute next.

Plain logic without torch or a device: `waiting` does what is decided here.
"""

from collections.abc import Hashable


class Turns:
    """Buffers that take turns, and the order in which blocks were used.

    Blocks are named by any number, such as the `id` of a module.

    Args:
        buffers: how many buffers there are.
    """

    def __init__(self, buffers: int) -> None:
        self._held: list[int | None] = [None] * buffers
        self._users = [0] * buffers
        # Buffers, the one that was used longest ago first.
        self._turn = list(range(buffers))
        self._next: dict[int, int] = {}
        self._last: dict[Hashable, int] = {}

    def find(self, block: int) -> int | None:
        """Return the buffer that holds a block."""
        return self._held.index(block) if block in self._held else None

    def find_or_take(self, block: int) -> int | None:
        """Return the buffer that holds a block, or else one that `take` gives it."""
        found = self.find(block)
        return self.take(block) if found is None else found

    def take(self, block: int) -> int | None:
        """Give a block the buffer without users whose turn it is; return None if all have users.

        What that buffer held is gone. The caller fills it, and calls `drop` if that fails.
        """
        for buffer in self._turn:
            if self._users[buffer] == 0:
                self._held[buffer] = block
                self._to_end(buffer)
                return buffer
        return None

    def enter(self, buffer: int) -> None:
        """Note a user of a buffer: until it leaves, no other block takes the buffer."""
        self._users[buffer] += 1
        self._to_end(buffer)

    def leave(self, buffer: int) -> None:
        """Note that a user has gone; what the buffer holds stays until another block takes it."""
        self._users[buffer] -= 1

    def drop(self, block: int) -> None:
        """Forget that a buffer holds a block."""
        self._held = [None if held == block else held for held in self._held]

    def forget(self, block: int) -> None:
        """Forget all about a block, which is gone."""
        self.drop(block)
        self._next = {key: value for key, value in self._next.items() if block not in (key, value)}
        self._last = {key: value for key, value in self._last.items() if value != block}

    def expect(self, block: int, following: int) -> None:
        """Assume an order until another one is seen."""
        self._next.setdefault(block, following)

    def follow(self, block: int, caller: Hashable) -> int | None:
        """Note that a caller uses a block now; return the block that came next the last time.

        Args:
            block: in use from now on.
            caller: who uses it, such as a thread: each has an order of its own.
        """
        last = self._last.get(caller)
        if last is not None and last != block:
            self._next[last] = block
        self._last[caller] = block
        return self._next.get(block)

    def _to_end(self, buffer: int) -> None:
        self._turn.remove(buffer)
        self._turn.append(buffer)
