"""What a way to copy bytes from the host to devices is; `ways` is the table of all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from shmload._decoding.ring import Ring
from shmload._host.descriptors import Inode

if TYPE_CHECKING:  # both import torch
    from shmload._devices.moves import Allocation, Moves
    from shmload._devices.runtime import Runtime


class Copier(Protocol):
    """A way in use by one load; a context that unpins what it pinned.

    When one of its methods raises, no copy is under way and nothing stays pinned after the context.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def stream(self, moves: "Moves", hollow: Sequence[Inode]) -> None:
        """Copy the ring's slots while workers fill them; blocks until the last one is copied.

        Args:
            moves: where the bytes go.
            hollow: the files that the tensors seem to lie in, by the number that slots name.

        Raises:
            torch.OutOfMemoryError: the device is full.
            RuntimeError: a driver failed.
        """

    def copy(
        self, allocations: Sequence["Allocation"], files: Sequence[tuple[Inode, int]]
    ) -> Sequence["Allocation"]:
        """Copy bytes of this process's memory to allocations; blocks until all bytes are there.

        Args:
            allocations: on any of the load's devices.
            files: the segments that the bytes may lie in, each with a descriptor, the caller's.

        Returns:
            The allocations that this way could not copy by itself: their bytes took the ring.

        Raises:
            torch.OutOfMemoryError: the device is full.
            RuntimeError: a driver failed.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to copy bytes from the host to devices."""

    name: str
    """What `pin=` calls it."""
    is_measured: bool
    """Whether `pin="auto"` measures it and may choose it."""
    why_not: Callable[["Runtime"], str | None]
    """Says in words why a device cannot be fed like this; None if it can."""
    open: Callable[[Ring, "Runtime"], Copier]
    """Starts to use it, with a ring that stays the caller's and the runtime that pins memory."""


def always_possible(runtime: "Runtime") -> str | None:
    """Return None: no device is refused."""
    return None
