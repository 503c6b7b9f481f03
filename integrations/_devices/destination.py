"""Where a load's weights go, as the caller said it: checked before anything is decoded."""

import fnmatch
import os
import sys
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from shmload._checkpoints.resolve import Source
from shmload._decoding.ring import Ring, ring_shape
from shmload._placement.device_map import STRATEGIES, devices_in, hint_for
from shmload._placement.inventory import (
    CPU,
    DISK,
    META,
    OFFLOAD,
    canonical_device,
    choose_inventory,
)
from shmload._settings import parse_nbytes, worker_count
from shmload.errors import (
    ArgumentError,
    DeviceMapMalformed,
    DeviceMissing,
    MemoryLimitExceeded,
    UnknownComponent,
)
from shmload.integrations._devices.runtimes import is_known, may_have_accelerators
from shmload.integrations._devices.ways import Pin, require_pin

_ON_THE_HOST = (CPU, DISK, META, OFFLOAD)


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a load's weights, and what the copies there may use.

    Raises:
        ArgumentError: a value is not valid, or two of them exclude each other.
    """

    device_map: object
    """As `load_pipeline` takes it."""
    max_memory: Mapping[Any, object] | None = None
    """As `load_pipeline` takes it."""
    max_host_nbytes: int | None = None
    """How much memory of the host weights may take on their way, in bytes; None for no limit."""
    pin: Pin = "auto"
    """The way to copy to accelerators."""
    offload_folder: str | os.PathLike[str] | None = None
    """For weights that wait on a disk."""

    def __post_init__(self) -> None:
        require_pin(self.pin)
        if self.max_memory is not None and not isinstance(self.max_memory, Mapping):
            raise ArgumentError(
                f"max_memory is {self.max_memory!r}; it must be a dict of sizes by device"
            )
        for _, value in devices_in(self.device_map):
            _require_device(value)
            if value == DISK and self.offload_folder is None:
                raise ArgumentError(
                    "device_map: some weights wait on a disk; give `offload_folder`"
                )

    @property
    def is_away(self) -> bool:
        """Whether the map by itself, without a strategy, sends every weight to an accelerator."""
        return all(_is_accelerator(device) for _, device in devices_in(self.device_map))

    def require_known(self, source: Source, passed: Collection[str]) -> None:
        """Check that the components that the map names exist; a single model has none.

        Args:
            source: to load.
            passed: names of the components that the caller passes in.

        Raises:
            UnknownComponent: one does not.
        """
        if not source.is_pipeline:
            return
        known = {*source.components, *passed}
        names = self.device_map if isinstance(self.device_map, Mapping) else ()
        for name in names:
            component = str(name).partition(".")[0]
            if component and not fnmatch.filter(known, component):
                raise UnknownComponent(component, source.given, known)

    def require_present(self) -> None:
        """Check that the machine has the accelerators that the map names, before a decode.

        Only torch can tell for sure. If there may be one, and torch is not imported yet, decoding
        should not wait for it: then the check comes with the copies.

        Raises:
            DeviceMissing: one is not there.
        """
        named = {
            canonical_device(device)
            for _, device in devices_in(self.device_map)
            if _is_accelerator(device)
        }
        if not named or ("torch" not in sys.modules and may_have_accelerators()):
            return
        inventory = choose_inventory(None, None)
        for device in sorted(named):
            if inventory.find(device) is None:
                raise DeviceMissing(device, [each.name for each in inventory.devices])

    def require_no_limit(self, source: Source, reason: str = "") -> None:
        """Check that no `max_host_memory` is given. For weights that cannot take the ring.

        Args:
            source: to load.
            reason: the library's error, if there was one.

        Raises:
            MemoryLimitExceeded: it is given.
        """
        if self.max_host_nbytes is not None:
            raise MemoryLimitExceeded(
                source_nbytes(source),
                self.max_host_nbytes,
                "max_host_memory",
                "this pipeline reads its weights while it is built"
                + (f", and without them that fails ({reason})" if reason else "")
                + "; load it without the limit",
            )

    def open_ring(self, source: Source) -> Ring | None:
        """Return a ring for the weights to pass through, the caller's; None to load by segments.

        A load takes segments if some weights stay on the host; also, without a limit, if all
        weights together are no larger than the ring.

        Raises:
            ArgumentError: memory of the host is limited, and some weights stay there.
        """
        if not self.is_away:
            if self.max_host_nbytes is not None:
                raise ArgumentError(
                    "max_host_memory is for weights that all go to accelerators, and this "
                    "device_map leaves some on the host; omit one of the two, or use "
                    "device_map='cuda'"
                )
            return None
        shape = ring_shape(worker_count(parent_is_busy=False), self.max_host_nbytes)
        is_worth_while = source_nbytes(source) > shape.nbytes
        return Ring(shape) if is_worth_while or self.max_host_nbytes is not None else None


def source_nbytes(source: Source) -> int:
    """Return the size of a source's shards together, in bytes."""
    shards = (shard for checkpoint in source.checkpoints for shard in checkpoint.shards)
    return sum(os.stat(shard).st_size for shard in shards)


def parse_max_host_memory(value: float | str | None) -> int | None:
    """Read a number of bytes, or a size such as `512MiB`.

    Raises:
        ArgumentError: it is neither.
    """
    if value is None or isinstance(value, int | float):
        return None if value is None else int(value)
    try:
        return parse_nbytes(value)
    except ValueError as exc:
        raise ArgumentError(f"max_host_memory: {exc}") from exc


def _require_device(device: object) -> None:
    """Check that a value is a strategy or a device; this machine need not have the device.

    Raises:
        ArgumentError: it is neither.
    """
    if device in STRATEGIES:
        return
    kind = canonical_device(device).partition(":")[0]
    if kind not in _ON_THE_HOST and not is_known(kind):
        raise DeviceMapMalformed(
            f"{device!r} is neither a strategy ({', '.join(STRATEGIES)}) nor a device "
            f"({', '.join(_ON_THE_HOST)}; cuda:0 for the first GPU){hint_for(device)}"
        )


def _is_accelerator(device: object) -> bool:
    return device not in STRATEGIES and canonical_device(device) not in _ON_THE_HOST
