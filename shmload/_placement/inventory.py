"""The devices and how much each holds: this machine's, or invented ones to plan for another.

A device has one name everywhere: `cuda:0`, `cpu`, `disk`. A device map has two more targets:
`meta` holds nothing; `offload` is the CPU's memory for weights that an accelerator computes with
(with weights on `cpu` the CPU computes).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from shmload._host.procfs import cgroup_free_nbytes, machine_free_nbytes
from shmload._settings import parse_nbytes, settings
from shmload.errors import ArgumentError

CPU, DISK, META, OFFLOAD = "cpu", "disk", "meta", "offload"
_WITHOUT_INDEX = (CPU, DISK, META, OFFLOAD)
_BOUNDLESS_NBYTES = 1 << 62
_NAME = re.compile(r"([a-z][a-z_]*)(?::(\d+))?")
_COUNTED = re.compile(r"(\d+)\s*x\s*(.+)")


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device and its memory."""

    name: str
    nbytes: int
    """How many bytes of weights may lie there at most."""
    room_nbytes: int
    """How many bytes a strategy puts there at most; it leaves the rest to activations."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Devices, accelerators first and by index.

    An accelerator that is not listed does not exist; `cpu` and `disk` then have no limit.
    """

    devices: tuple[Device, ...]

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """Its devices other than `cpu` and `disk`; may be none."""
        return tuple(device for device in self.devices if device.name not in _WITHOUT_INDEX)

    @property
    def kind(self) -> str:
        """The name of its accelerators without index; `cuda` if there are none."""
        return self.accelerators[0].name.partition(":")[0] if self.accelerators else "cuda"

    def find(self, name: str) -> Device | None:
        """Return a device by its name; None if it is not listed."""
        return next((device for device in self.devices if device.name == name), None)

    def __str__(self) -> str:
        return ", ".join(device.name for device in self.devices)


def canonical_device(device: object, kind: str = "cuda") -> str:
    """Return the one name of a device, given in any usual way.

    Args:
        device: an index, a `torch.device`, or a name such as `cuda:1`, `cuda`, `cpu`, `offload`.
        kind: the accelerator that a bare index means.

    Raises:
        ArgumentError: it is not a device.
    """
    # str(torch.device("cuda", 1)) is "cuda:1": no need to import torch.
    text = str(device).strip().lower()
    if text.isdecimal() and not isinstance(device, bool | float):
        return f"{kind}:{int(text)}"
    match = _NAME.fullmatch(text)
    if match is None or isinstance(device, bool) or device is None:
        raise ArgumentError(
            f"{device!r} is not a device; use an index, cuda:0, {', '.join(_WITHOUT_INDEX)}"
        )
    found, index = match.groups()
    return found if found in _WITHOUT_INDEX else f"{found}:{int(index or 0)}"


def parse_inventory(text: str) -> Inventory:
    """Read an invented inventory, such as `2x24GiB` or `cuda:0=20GiB,cuda:1=24GiB,cpu=64GiB`.

    A size without a name is the next accelerator's, `2x` that of the next two. The setting
    `headroom` says which fraction of each accelerator's memory is left to activations.

    Raises:
        ArgumentError: it cannot be read; the message says how to write it.
    """
    found: dict[str, int] = {}
    for item in text.split(","):
        for name, size in _named_sizes(item.strip(), len(found)):
            if name in found:
                raise ArgumentError(f"inventory {text!r} has {name} twice")
            found[name] = _nbytes(size)
    return _inventory(found, settings().headroom)


def _named_sizes(item: str, index: int) -> list[tuple[str, str]]:
    name, equals, size = item.partition("=")
    if equals:
        return [(_held(name), size)]
    counted = _COUNTED.fullmatch(item)
    count, size = (int(counted[1]), counted[2]) if counted else (1, item)
    return [(f"cuda:{index + number}", size) for number in range(count)]


def limit_inventory(
    max_memory: Mapping[Any, object], inventory: Inventory | None = None
) -> Inventory:
    """Limit what may lie on some devices, as accelerate's `max_memory` does.

    Args:
        max_memory: by index, name or `torch.device`; sizes in bytes or like `20GiB`. These are
            limits for weights, so nothing is left to activations.
        inventory: its other devices keep their limits; None for no other devices.

    Raises:
        ArgumentError: a key is not a device, or a value is not a size.
    """
    if not isinstance(max_memory, Mapping):
        raise ArgumentError(f"max_memory is {max_memory!r}; it must be a dict of sizes by device")
    kind = inventory.kind if inventory else "cuda"
    limited = _inventory({_held(k, kind): _nbytes(v) for k, v in max_memory.items()}, 0.0)
    named = {device.name for device in limited.devices}
    others = (
        [device for device in inventory.devices if device.name not in named] if inventory else ()
    )
    return Inventory(devices=_in_order((*limited.devices, *others)))


def choose_inventory(
    inventory: str | Inventory | None, max_memory: Mapping[Any, object] | None
) -> Inventory:
    """Return the devices to plan for: the given ones, or else this machine's.

    Args:
        inventory: a value, or a text for `parse_inventory`.
        max_memory: for `limit_inventory`; without an inventory it lists all devices there are.

    Raises:
        ArgumentError: one of them cannot be read.
    """
    found = parse_inventory(inventory) if isinstance(inventory, str) else inventory
    if max_memory is not None:
        return limit_inventory(max_memory, found)
    return found or machine_inventory()


def without_host_limits(inventory: Inventory, max_memory: Mapping[Any, object] | None) -> Inventory:
    """Drop the limit of the CPU unless the caller has set one: the weights are there already."""
    named = {_held(device, inventory.kind) for device in max_memory or ()}
    if CPU in named:
        return inventory
    others = [device for device in inventory.devices if device.name != CPU]
    boundless = Device(name=CPU, nbytes=_BOUNDLESS_NBYTES, room_nbytes=_BOUNDLESS_NBYTES)
    return Inventory(devices=_in_order((*others, boundless)))


def machine_inventory() -> Inventory:
    """Return this machine's devices, each limited to its free memory; imports torch."""
    import torch

    free = [cgroup_free_nbytes(), machine_free_nbytes()]
    found = {CPU: min(nbytes for nbytes in free if nbytes is not None)}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            # What torch has reserved and does not use counts as free.
            unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
            found[f"cuda:{index}"] = torch.cuda.mem_get_info(index)[0] + unused
    return _inventory(found, settings().headroom)


def _inventory(found: Mapping[str, int], headroom: float) -> Inventory:
    devices = (
        Device(
            name=name,
            nbytes=nbytes,
            room_nbytes=nbytes if name in _WITHOUT_INDEX else int(nbytes * (1 - headroom)),
        )
        for name, nbytes in found.items()
    )
    return Inventory(devices=_in_order(devices))


def _in_order(devices: Iterable[Device]) -> tuple[Device, ...]:
    def sort_key(device: Device) -> tuple[bool, str, int]:
        kind, _, index = device.name.partition(":")
        return device.name in _WITHOUT_INDEX, kind, int(index or 0)

    return tuple(sorted(devices, key=sort_key))


def _held(device: object, kind: str = "cuda") -> str:
    name = canonical_device(device, kind)
    if name in (META, OFFLOAD):
        raise ArgumentError(f"{name} has no memory of its own to limit; it takes the cpu's")
    return name


def _nbytes(size: object) -> int:
    try:
        if isinstance(size, str):
            return parse_nbytes(size)
        if isinstance(size, int | float) and not isinstance(size, bool) and size >= 0:
            return int(size)
    except (ValueError, OverflowError):
        pass
    raise ArgumentError(
        f"{size!r} is not the size of a device; write 24GiB, 2x24GiB or cuda:1=24GiB"
    )
