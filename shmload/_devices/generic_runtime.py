"""Devices of any kind that torch knows, by the streams and events that it has for all of them.

Such devices are Intel's GPUs (`xpu`), and what a package adds to torch (`npu`, `mlu`, `musa`).
Torch has no call that pins memory which exists already. So the ring that this process fills is
allocated pinned, and the one that workers fill is not.
"""

from collections.abc import Sequence

import torch

from shmload._devices.runtime import ALIGNMENT_NBYTES, Event
from shmload._wording import logger_of
from shmload.errors import DeviceUnsupported

logger = logger_of(__name__)


class GenericRuntime:
    """One device; each lane is a `torch.Stream`.

    Args:
        device: with its index.

    Raises:
        DeviceUnsupported: torch lacks something for it; the error names it.
    """

    registers_read_only = False

    def __init__(self, device: torch.device) -> None:
        _require_streams(device)
        self.device = device
        self.name = _name_of(device)
        self.driver = _driver_version(device)
        self._consumer = torch.accelerator.current_stream(device)
        self._streams: dict[int, torch.Stream] = {}
        self._is_pinning = True

    def reserve(self, sizes: Sequence[int]) -> None:
        pass

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        begin = -memory.data_ptr() % ALIGNMENT_NBYTES
        if begin == 0:
            return memory
        # This device's allocator aligns to less.
        raw = torch.empty(nbytes + ALIGNMENT_NBYTES, dtype=torch.uint8, device=self.device)
        begin = -raw.data_ptr() % ALIGNMENT_NBYTES
        return raw[begin : begin + nbytes]

    def copy(self, target: torch.Tensor, source: torch.Tensor, lane: int) -> None:
        with self._stream(lane):
            target.copy_(source, non_blocking=True)

    def follow(self, lane: int) -> None:
        self._stream(lane).wait_stream(torch.accelerator.current_stream(self.device))

    def join(self, lane: int) -> None:
        torch.accelerator.current_stream(self.device).wait_stream(self._stream(lane))

    def record(self, lane: int) -> Event:
        event = torch.Event(self.device)
        event.record(self._stream(lane))
        return _GenericEvent(event)

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        return False

    def unregister(self, address: int) -> None:
        pass

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

    def _stream(self, lane: int) -> torch.Stream:
        if lane not in self._streams:
            stream = torch.Stream(device=self.device)
            stream.wait_stream(self._consumer)
            self._streams[lane] = stream
        return self._streams[lane]


class _GenericEvent:
    def __init__(self, event: "torch.Event") -> None:
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


def _name_of(device: torch.device) -> str:
    """Return the device's model, or its own name if torch does not know the model."""
    try:
        return str(getattr(torch, device.type).get_device_name(device))
    except _UNKNOWN:
        return str(device)


def _driver_version(device: torch.device) -> str:
    try:
        return str(getattr(torch, device.type).get_device_properties(device).driver_version)
    except _UNKNOWN:
        return ""
