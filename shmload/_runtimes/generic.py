"""Devices of any kind that torch knows, by the streams and events that it has for all of them.

Such devices are Intel's GPUs (`xpu`), and what a package adds to torch (`npu`, `mlu`, `musa`).
Torch has no call that pins memory which exists already. So the ring that this process fills is
allocated pinned, and the one that workers fill is not.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch

from shmload._runtimes.runtime import Event, Runtime, aligned
from shmload._wording import logger_of
from shmload.errors import DeviceUnsupported

logger = logger_of(__name__)


class GenericRuntime(Runtime):
    """One device; each lane is a stream.

    Args:
        device: with its index.

    Raises:
        DeviceUnsupported: torch lacks something for it; the error names it.
    """

    def __init__(self, device: torch.device) -> None:
        self._require_streams(device)
        self.device = device
        self.name = name_of(device)
        self.driver = self._driver_version()
        self._consumer = self._current_stream()
        self._streams: dict[int, Any] = {}
        self._here = threading.local()
        self._is_pinning = True

    def empty(self, nbytes: int) -> torch.Tensor:
        make = functools.partial(torch.empty, dtype=torch.uint8, device=self.device)
        return aligned(make, nbytes)

    @contextlib.contextmanager
    def using(self, lane: int) -> Iterator[None]:
        with self._using(self._stream(lane)):
            self._here.lane = lane
            try:
                yield
            finally:
                del self._here.lane

    def copy(self, target: torch.Tensor, source: torch.Tensor, lane: int) -> None:
        is_here = getattr(self._here, "lane", None) == lane
        with contextlib.nullcontext() if is_here else self._using(self._stream(lane)):
            target.copy_(source, non_blocking=True)

    def follow(self, lane: int) -> None:
        self._stream(lane).wait_stream(self._current_stream())

    def join(self, lane: int) -> None:
        self._current_stream().wait_stream(self._stream(lane))

    def record(self, lane: int) -> Event:
        event = self._new_event()
        event.record(self._stream(lane))
        return _RecordedEvent(event)

    def pinned(self, nbytes: int) -> torch.Tensor | None:
        if self._is_pinning:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except (RuntimeError, NotImplementedError) as exc:
                self._is_pinning = False
                reason = str(exc).partition("\n")[0]
                logger.warning("torch pins no memory for %s (%s): copies are slower", self, reason)
        return None

    def __str__(self) -> str:
        return f"{self.device} ({self.name})"

    def _stream(self, lane: int) -> Any:
        if lane not in self._streams:
            stream = self._new_stream()
            stream.wait_stream(self._consumer)
            self._streams[lane] = stream
        return self._streams[lane]

    # What a kind may have of its own, for releases of torch that lack the generic ones --------

    def _require_streams(self, device: torch.device) -> None:
        _require_streams(device)

    def _new_stream(self) -> Any:
        return torch.Stream(device=self.device)

    def _current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def _using(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which copies go to a stream."""
        return cast("contextlib.AbstractContextManager[Any]", stream)

    def _new_event(self) -> Any:
        return torch.Event(self.device)

    def _driver_version(self) -> str:
        try:
            return str(
                getattr(torch, self.device.type).get_device_properties(self.device).driver_version
            )
        except _UNKNOWN:
            return ""


class _RecordedEvent:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


def _require_streams(device: torch.device) -> None:
    """Check that torch has streams and events for a device.

    Raises:
        DeviceUnsupported: it does not.
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


def _unsupported(device: torch.device, lacks: str, reason: str, remedy: str) -> DeviceUnsupported:
    remedy += f"; or omit device_map and call .to({device.type!r}) on the pipeline"
    return DeviceUnsupported(str(device), reason, remedy, lacks)


# Modules of devices need not have the functions below, nor need these work.
_UNKNOWN = (AttributeError, RuntimeError, AssertionError, TypeError)


def name_of(device: torch.device) -> str:
    """Return the device's model, or its own name if torch does not know the model."""
    try:
        return str(getattr(torch, device.type).get_device_name(device))
    except _UNKNOWN:
        return str(device)
