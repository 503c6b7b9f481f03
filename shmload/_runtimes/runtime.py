"""What a copy asks of a kind of device: memory, streams, events, pinned pages.

A kind of device is a `Runtime` and its row in `kinds`. All keep what the class of tests in
`tests/support/runtime_contract.py` says.

Copies of one lane happen in the order in which they were started; lanes are independent, as CUDA's
streams are. A copy may read its source after `copy` has returned: the source must not change until
an event that was recorded after the copy is over.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

ALIGNMENT_NBYTES = 256
"""What CUDA's own allocations are aligned to at least, and vectorised kernels are fastest with."""


class Event(Protocol):
    """A point in a lane, behind the copies that were started before it was recorded."""

    def wait(self) -> None:
        """Block until those copies are done."""


class Runtime(Protocol):
    """One device. Several threads may use it, but only one thread each lane."""

    device: torch.device
    """The device; with its index, if devices of its kind have one."""
    name: str
    """The device's model, such as `NVIDIA H200`."""
    driver: str = ""
    """The version of its driver; empty if that is unknown."""

    def __init__(self, device: torch.device) -> None:
        """Make the runtime of a device, given with its index."""

    @staticmethod
    def free_without_context(indices: Iterable[int]) -> dict[int, int]:
        """Return the free memory of devices of this kind, in bytes, by their index.

        Args:
            indices: of devices. Those are left out of which torch knows more: that is so where this
                process has a context, and where only making one would tell.
        """
        return {}

    @property
    def registers_read_only(self) -> bool:
        """Whether pages that are mapped for reading only can be registered, as far as is known.

        A refused `register` of such pages may end this. If it is false, `register` asks no driver
        for them; pages of a shared mapping may be registered while it is writable.
        """
        return False

    def reserve(self, sizes: Sequence[int]) -> None:
        """Have the device's allocator get memory for the next calls of `empty` all at once.

        Nothing is held afterwards: the allocator cuts what `empty` returns from what it got, and
        each piece is freed by itself. Does nothing where that is not so, or if the device is full.

        Args:
            sizes: what `empty` will be called with, in bytes.
        """
        return

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return new memory of the device: uint8, flat, aligned to `ALIGNMENT_NBYTES`.

        Raises:
            torch.OutOfMemoryError: the device is full.
        """

    def using(self, lane: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a thread starts copies on a lane faster than without."""
        return contextlib.nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor, lane: int) -> None:
        """Start to copy bytes of the host to the device.

        Args:
            target: memory from `empty`, or a slice of it.
            source: on the host, pinned or not; uint8 and flat, as long as the target.
            lane: a small number; a new one makes a new stream.

        Raises:
            torch.OutOfMemoryError: the device is full.
            RuntimeError: a driver failed.
        """

    def follow(self, lane: int) -> None:
        """Have a lane's next copies wait for what the caller's current stream has queued.

        Memory from `empty` may still be in use there. Call it in the thread that called `empty`,
        before each group of copies.
        """

    def join(self, lane: int) -> None:
        """Have what the caller's current stream gets next wait for the copies started on a lane."""

    def record(self, lane: int) -> Event:
        """Return the point behind all copies that were started on a lane."""

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        """Pin pages of the host, so that the device fetches from them by itself.

        Args:
            address: of the first byte.
            nbytes: how many bytes.
            read_only: whether the pages are mapped for reading only.

        Returns:
            Whether the driver pinned them. If not, copies from there still work, but are slower.
        """
        return False

    def unregister(self, address: int) -> None:
        """Unpin what was registered at an address; no copy from there may be under way."""
        return

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        """Return new pinned memory of the host, for a device that registers no pages.

        Returns:
            Flat uint8, the caller's; None if the device pins by `register`, or not at all.
        """
        return None


def start(copies: Iterable[tuple[Runtime, torch.Tensor, torch.Tensor]], lane: int) -> list[Event]:
    """Start copies on a lane; returns the events after which their sources may change.

    Args:
        copies: each with its device, its target and its source.
        lane: of all of them.
    """
    runtimes: dict[Runtime, None] = {}
    for runtime, target, source in copies:
        runtime.copy(target, source, lane)
        runtimes[runtime] = None
    return [runtime.record(lane) for runtime in runtimes]


def drain(runtimes: Iterable[Runtime], lane: int) -> None:
    """Block until every copy that was started on a lane is done, also after one has failed."""
    with contextlib.ExitStack() as draining:  # each device, also if waiting for another one fails
        for runtime in runtimes:
            draining.callback(_drain, runtime, lane)


def _drain(runtime: Runtime, lane: int) -> None:
    runtime.record(lane).wait()


def aligned(make: Callable[[int], torch.Tensor], nbytes: int) -> torch.Tensor:
    """Return memory that begins at a multiple of `ALIGNMENT_NBYTES`, of an allocator that may not.

    Args:
        make: allocates a number of bytes: flat uint8.
        nbytes: how many bytes.
    """
    memory = make(nbytes)
    if memory.data_ptr() % ALIGNMENT_NBYTES:
        memory = make(nbytes + ALIGNMENT_NBYTES)
    begin = -memory.data_ptr() % ALIGNMENT_NBYTES
    return memory[begin : begin + nbytes]


class HostRuntime(Runtime):
    """The host as a device: a copy is done when it has been started, and nothing needs pinning."""

    device = torch.device("cpu")
    name = "the host"
    registers_read_only = True

    def __init__(self, device: torch.device) -> None:
        pass

    def empty(self, nbytes: int) -> torch.Tensor:
        return aligned(functools.partial(torch.empty, dtype=torch.uint8), nbytes)

    def copy(self, target: torch.Tensor, source: torch.Tensor, lane: int) -> None:
        target.copy_(source)

    def follow(self, lane: int) -> None:
        pass

    def join(self, lane: int) -> None:
        pass

    def record(self, lane: int) -> Event:
        return _Done()

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        return True


class _Done:
    def wait(self) -> None:
        pass
