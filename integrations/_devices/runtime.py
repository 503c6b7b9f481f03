"""A device's runtime as an upload sees it: memory, copies in order, events, registered pages.

Copies of one lane happen in the order they were begun; lanes are independent. A copy reads its
source after `copy` has returned: until an event that was recorded behind it is over, the source
must stay as it is.
"""

import contextlib
import functools
import logging
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from shmload.errors import ArgumentError

logger = logging.getLogger(__name__)

ALIGNMENT_NBYTES = 256
"""What CUDA's own allocations are aligned to at least, and vectorised kernels are fastest with."""

# cuda.h: cudaHostRegisterPortable, for all devices of the process; cudaHostRegisterReadOnly.
_PORTABLE, _READ_ONLY = 0x01, 0x08


class Event(Protocol):
    """A point behind some copies."""

    def wait(self) -> None:
        """Block until they are done."""


class Runtime(Protocol):
    """The calls that an upload makes; may be used from several threads, a lane from one."""

    device: torch.device
    name: str
    """What kind of device it is."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return fresh memory of the device: uint8, flat, aligned to `ALIGNMENT_NBYTES`."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, lane: int) -> None:
        """Begin to copy bytes of the host, uint8 and flat, into as many of the device."""

    def record(self, lane: int) -> Event:
        """Return the point behind all copies that were begun on a lane."""

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        """Make pages of the host known to the device, so that it fetches them itself.

        Returns:
            Whether that was possible; if not, copies from there work too, and are slower.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`, after all copies from there."""


def drain(runtimes: Iterable[Runtime], lane: int) -> None:
    """Block until every copy that was begun on a lane is done, also where a later one failed."""
    with contextlib.ExitStack() as draining:  # each, whatever becomes of the others
        for runtime in runtimes:
            draining.callback(_drain, runtime, lane)


def _drain(runtime: Runtime, lane: int) -> None:
    runtime.record(lane).wait()


class _Host:
    """The host as a device: copies at once."""

    device = torch.device("cpu")
    name = "the host"

    def empty(self, nbytes: int) -> torch.Tensor:
        raw = torch.empty(nbytes + ALIGNMENT_NBYTES, dtype=torch.uint8)
        begin = -raw.data_ptr() % ALIGNMENT_NBYTES
        return raw[begin : begin + nbytes]

    def copy(self, target: torch.Tensor, source: torch.Tensor, lane: int) -> None:
        target.copy_(source)

    def record(self, lane: int) -> Event:
        return _Over()

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        return True

    def unregister(self, address: int) -> None:
        pass


class _Over:
    def wait(self) -> None:
        pass


class _Cuda:
    """One CUDA device; a lane is a stream of its own.

    Args:
        device: with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = torch.cuda.get_device_name(device)
        self._streams: dict[int, torch.cuda.Stream] = {}
        # Where the memory that is filled here is used: it may be memory whose former use is queued.
        self._consumer = torch.cuda.current_stream(device)

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, lane: int) -> None:
        with torch.cuda.stream(self._stream(lane)):
            target.copy_(source, non_blocking=True)

    def record(self, lane: int) -> Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream(lane))
        return _CudaEvent(event)

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        flags = _PORTABLE | (_READ_ONLY if read_only else 0)
        with torch.cuda.device(self.device):
            error = _cudart().cudaHostRegister(address, nbytes, flags)
            if int(error) == 0:
                return True
            self._clear_error()
        _say_once(f"the driver of {self.name} does not pin memory of the host ({error})")
        return False

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.device):
            if int(_cudart().cudaHostUnregister(address)) != 0:
                self._clear_error()

    def _stream(self, lane: int) -> torch.cuda.Stream:
        if lane not in self._streams:
            stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(self._consumer)
            self._streams[lane] = stream
        return self._streams[lane]

    def _clear_error(self) -> None:
        """Take the last error from the runtime, or the next kernel would be blamed for it."""
        try:
            torch.zeros(1, device=self.device)
        except RuntimeError as exc:
            logger.debug("cleared: %s", exc)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("%s; copies are slower without, and nothing else", reason)


def runtime_of(device: torch.device) -> Runtime:
    """Return the runtime of a device that tensors are to be copied to.

    Raises:
        ArgumentError: it is no kind of device that shmload copies to.
    """
    match device.type:
        case "cuda":
            return _Cuda(torch.device("cuda", device.index or 0))
        case "cpu":
            return _Host()
        case _:
            raise ArgumentError(f"{device} is no device that shmload copies to; those of CUDA are")
