"""What a copy asks of a device: memory, a stream for copies, events, page-locked host memory.

`Runtime` is a device of any kind that torch knows, by the streams and events that it has for all of
them: Intel's GPUs (`xpu`), and what a package adds to torch (`npu`, `mlu`, `musa`). A kind with
more to offer is a subclass, and a row in `kinds`. All keep what the class of tests in
`tests/support/runtime_contract.py` says.

Copies happen in the order in which they were started. A copy may read its source after `copy` has
returned: the source must not change until an event that was recorded after the copy is over.
"""

import contextlib
import functools
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from shmload._wording import logger_of
from shmload.errors import ArgumentError

logger = logger_of(__name__)

ALIGNMENT_NBYTES = 256
"""What CUDA's own allocations are aligned to at least, and vectorised kernels are fastest with."""

# Modules of devices need not have the functions that are asked for, nor need these work.
_UNKNOWN = (AttributeError, RuntimeError, AssertionError, TypeError)


class Runtime:
    """One device, and a stream of its own that copies go to; one thread at a time copies.

    Args:
        device: with its index.

    Raises:
        ArgumentError: torch lacks something for it; the error names it.
    """

    def __init__(self, device: torch.device) -> None:
        self._require_streams(device)
        self.device = device
        self.name = name_of(device)
        """The device's model, such as `NVIDIA H200`."""
        self._stream = self._new_stream()
        self.follow()

    @staticmethod
    def free_without_context(indices: Iterable[int]) -> dict[int, int]:
        """Return the free memory of devices of this kind, in bytes, by their index.

        Args:
            indices: of devices. Those are left out of which torch knows more: that is so where this
                process has a context, and where only making one would tell.
        """
        return {}

    @property
    def is_integrated(self) -> bool:
        """Whether the device uses the host's memory.

        To read a writable private mapping of a file, such a device has the kernel copy each page.
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
        make = functools.partial(torch.empty, dtype=torch.uint8, device=self.device)
        memory = make(nbytes)
        if memory.data_ptr() % ALIGNMENT_NBYTES:  # of an allocator that aligns to less
            memory = make(nbytes + ALIGNMENT_NBYTES)
        begin = -memory.data_ptr() % ALIGNMENT_NBYTES
        return memory[begin : begin + nbytes]

    def copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Start to copy bytes of the host to the device.

        Args:
            copies: targets, which are memory from `empty` or slices of it, and their sources on the
                host, page-locked or not; all are uint8 and flat, and as long as each other.

        Raises:
            torch.OutOfMemoryError: the device is full.
            RuntimeError: a driver failed.
        """
        with self._using(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)

    def follow(self) -> None:
        """Have the next copies wait for what the caller's current stream has queued.

        Memory from `empty` may still be in use there. Call it in the thread that called `empty`,
        before each group of copies.
        """
        self._stream.wait_stream(self._current_stream())

    def join(self) -> None:
        """Have what the caller's current stream gets next wait for the copies started so far."""
        self._current_stream().wait_stream(self._stream)

    def keep(self, memory: torch.Tensor) -> None:
        """Have memory that is freed wait for what the caller's current stream does with it.

        Other memory waits for the stream that was current when it was allocated.
        """
        if memory.device.type == self.device.type:
            with contextlib.suppress(NotImplementedError):
                memory.record_stream(self._current_stream())

    def record(self) -> Any:
        """Return an event behind all copies that were started; `synchronize` waits for it."""
        event = self._new_event()
        event.record(self._stream)
        return event

    def drain(self) -> None:
        """Block until every copy that was started is done, also after one has failed."""
        self.record().synchronize()

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        """Page-lock memory of the host, so that the device fetches from it by itself.

        Args:
            address: of the first byte.
            nbytes: how many bytes.
            read_only: whether the pages are mapped for reading only.

        Returns:
            Whether the driver did. If not, copies from there still work, but are slower.
        """
        return False

    def unregister(self, address: int) -> None:
        """Release what was registered at an address; no copy from there may be under way."""
        return

    def page_locked(self, nbytes: int) -> torch.Tensor | None:
        """Return new page-locked memory of the host, for a driver that registers none.

        Returns:
            Flat uint8, the caller's; None if the driver locks no pages.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, NotImplementedError) as exc:
            say_once(f"{self.name}: torch page-locks no memory ({str(exc).partition(chr(10))[0]})")
            return None

    # What a kind may have of its own, for releases of torch that lack the generic ones --------

    def _require_streams(self, device: torch.device) -> None:
        require_streams(device)

    def _new_stream(self) -> Any:
        return torch.Stream(device=self.device)

    def _current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def _using(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which copies go to a stream."""
        return cast("contextlib.AbstractContextManager[Any]", stream)

    def _new_event(self) -> Any:
        return torch.Event(self.device)


def require_streams(device: torch.device) -> None:
    """Check that torch has streams and events for a device.

    Raises:
        ArgumentError: it does not.
    """
    for holder, name, since in (
        (torch, "torch.accelerator", "2.6"),
        (torch.Stream, "torch.Stream.__enter__", "2.7"),
    ):
        if not hasattr(holder, name.rpartition(".")[2]):
            remedy = f"install torch {since} or later"
            raise _unsupported(device, name, f"torch {torch.__version__} lacks {name}", remedy)
    for name, make in (("torch.Stream", torch.Stream), ("torch.Event", torch.Event)):
        try:
            make(device=device)
        except (RuntimeError, NotImplementedError, AssertionError) as exc:
            reason = f"it has no {name} ({str(exc).partition(chr(10))[0]})"
            remedy = f"import the package that adds `{device.type}` to torch, or update it"
            raise _unsupported(device, name, reason, remedy) from exc


def _unsupported(device: torch.device, lacks: str, reason: str, remedy: str) -> ArgumentError:
    return ArgumentError(
        f"shmload cannot copy weights to {device}: {reason}; {remedy}; or omit device_map and call "
        f".to({device.type!r}) on the pipeline",
        device=str(device),
        lacks=lacks,
    )


def name_of(device: torch.device) -> str:
    """Return the device's model, or its own name if torch does not know the model."""
    try:
        return str(getattr(torch, device.type).get_device_name(device))
    except _UNKNOWN:
        return str(device)


@functools.cache
def say_once(reason: str) -> None:
    """Warn of what makes copies slower."""
    logger.warning("%s; copies are slower without, and nothing else", reason)
