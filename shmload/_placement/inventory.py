"""The devices and how much each holds: this machine's, or invented ones to plan for another.

A device has one name everywhere: `cuda:0`, `cpu`. A device map has two more targets:
`meta` holds nothing; `offload` is the CPU's memory for weights that an accelerator computes with
(with weights on `cpu` the CPU computes).
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shmload._runtimes import kinds
from shmload._settings import parse_size, settings
from shmload._wording import nearest
from shmload.errors import ArgumentError

CPU, META, OFFLOAD = "cpu", "meta", "offload"
USUAL = f"{kinds.USUAL_KIND}:0"
"""What a bare index, and a kind without one, mean where no device is known."""
Rooms = Mapping[str, int]
"""Bytes by device, in the order of the devices: what may be used, or what is free."""
_WITHOUT_INDEX = (CPU, META, OFFLOAD)
_BOUNDLESS_NBYTES = 1 << 62
_NAME = re.compile(r"([a-z][a-z_]*)(?::(\d+))?")
_MAX_DEVICES = 1024  # no machine has more
_COUNTED = re.compile(r"(\d+)\s*x\s*(.+)")
_BARE = re.compile(r"0*[1-9]\d{0,5}")  # bytes, less than one MB of them


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A device and its memory."""

    name: str
    nbytes: int
    """How many bytes of weights may lie there at most."""
    room_nbytes: int
    """How many bytes a strategy puts there at most; it leaves the rest to activations."""

    @property
    def is_boundless(self) -> bool:
        """Whether it has no limit."""
        return self.nbytes >= _BOUNDLESS_NBYTES


def boundless(name: str) -> Device:
    """Return a device without a limit."""
    return _device(name, _BOUNDLESS_NBYTES)


def _device(name: str, nbytes: int, headroom: float = 0.0) -> Device:
    room_nbytes = int(nbytes * (1 - headroom)) if headroom and not is_on_the_host(name) else nbytes
    return Device(name=name, nbytes=nbytes, room_nbytes=room_nbytes)


def is_on_the_host(name: str) -> bool:
    """Tell whether a device, by its one name, takes no copies."""
    return name in _WITHOUT_INDEX


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Devices, accelerators first and by index.

    An accelerator that is not listed does not exist; `cpu` then has no limit.
    """

    devices: tuple[Device, ...] = ()
    others: tuple[str, ...] = ()
    """Names of accelerators that are there, and that nothing is placed on."""
    current_index: int = 0
    """Index of the accelerator that a name without one means, such as `xpu`."""

    @property
    def names(self) -> list[str]:
        """The names of all devices."""
        return [device.name for device in self.with_devices(map(boundless, self.others)).devices]

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """Its devices other than `cpu`; may be none."""
        return tuple(device for device in self.devices if not is_on_the_host(device.name))

    @property
    def current(self) -> str:
        """The accelerator that is meant by a name which leaves out the kind or the index."""
        names = [name for name in self.names if not is_on_the_host(name)]
        kind = names[0].partition(":")[0] if names else kinds.USUAL_KIND
        return f"{kind}:{self.current_index}"

    def rooms(self) -> Rooms:
        """Return what a strategy may put on each device that computes, in bytes."""
        devices = self.accelerators or (self.find(CPU) or boundless(CPU),)
        return {device.name: device.room_nbytes for device in devices}

    def with_devices(self, devices: Iterable[Device]) -> "Inventory":
        """Return an inventory that also has these, or has them instead of those of their name."""
        found = {device.name: device for device in (*self.devices, *devices)}
        return msgspec.structs.replace(self, devices=tuple(sorted(found.values(), key=_place_of)))

    def find(self, name: str) -> Device | None:
        """Return a device by its name; None if it is not listed."""
        return next((device for device in self.devices if device.name == name), None)

    def require(self, name: str, by: str = "device_map") -> None:
        """Raise ArgumentError if an accelerator, which an argument names, is not there."""
        if not is_on_the_host(name) and name not in self.names:
            raise ArgumentError(
                f"{by}: it names {name}, and the devices are {', '.join(self.names)}; take one of "
                "these, or plan for others with `shmload plan SOURCE --inventory 2x24GiB`",
                device=name,
            )


def _place_of(device: Device) -> tuple[bool, str, int]:
    kind, _, index = device.name.partition(":")
    return is_on_the_host(device.name), kind, int(index or 0)


def canonical_device(device: object, current: str = USUAL, *, others: Sequence[str] = ()) -> str:
    """Return the one name of a device, given in any usual way.

    Args:
        device: an index, a `torch.device`, or a name such as `cuda:1`, `cuda`, `cpu`, `offload`.
        current: the device that is meant if the kind or the index is left out.
        others: what the error names as right too.

    Raises:
        ArgumentError: it is not a device.
    """
    # str(torch.device("cuda", 1)) is "cuda:1": no need to import torch.
    text = str(device).strip().lower()
    current_kind, _, current_index = current.partition(":")
    if text.isdecimal() and not isinstance(device, bool | float):
        return f"{current_kind}:{int(text)}"
    match = None if device is None or isinstance(device, bool) else _NAME.fullmatch(text)
    kind, index = match.groups() if match else ("", None)
    if kind in _WITHOUT_INDEX:
        return kind
    if kind == current_kind or (kind and kinds.is_known(kind)):
        return f"{kind}:{int(index or (current_index if kind == current_kind else 0))}"
    if kind == "disk":
        raise ArgumentError(
            "weights do not wait on a disk; leave them on 'offload', or load them without shmload: "
            "from_pretrained(..., device_map=..., offload_folder=...)"
        )
    usual = f"(an index, {USUAL}, {', '.join((*_WITHOUT_INDEX, *others))})"
    meant = kinds.meant_kind(kind)
    known = (*kinds.KINDS, *_WITHOUT_INDEX, *others)
    hint = f"; did you mean {meant!r}?" if meant else nearest(kind, known)
    raise ArgumentError(f"{device!r} is not a device {usual}{hint}")


def parse_inventory(text: str) -> Inventory:
    """Read an invented inventory, such as `2x24GiB` or `cuda:0=20GiB,cuda:1=24GiB,cpu=64GiB`.

    A size without a name is the next accelerator's, `2x` that of the next two. The setting
    `headroom` says which fraction of each accelerator's memory is left to activations.

    Raises:
        ArgumentError: it cannot be read; the message says how to write it.
    """
    found: dict[str, int] = {}
    for item in text.split(","):
        name, equals, size = map(str.strip, item.rpartition("="))
        counted = None if equals else _COUNTED.fullmatch(size)
        count, size = (int(counted[1]), counted[2]) if counted else (1, size)
        if not 1 <= count <= _MAX_DEVICES:
            reason = f"there are 1 to {_MAX_DEVICES} devices; write 1x{size} for one"
            raise ArgumentError(f"inventory: {item.strip()!r}: {reason}")
        if _BARE.fullmatch(size):
            raise ArgumentError(f"inventory: {size!r} has no unit; write {size}GiB")
        next_ones = (f"{kinds.USUAL_KIND}:{len(found) + number}" for number in range(count))
        for each in [_limited_device("inventory", name)] if equals else [*next_ones]:
            if each in found:
                raise ArgumentError(f"inventory: {text!r} has {each} twice")
            found[each] = parse_size("inventory", size)
    devices = (_device(name, nbytes, settings().headroom) for name, nbytes in found.items())
    return Inventory().with_devices(devices)


def parse_max_memory(max_memory: Mapping[Any, object], current: str = USUAL) -> dict[str, int]:
    """Return the limits of some devices in bytes, by name.

    Args:
        max_memory: by index, name or `torch.device`; sizes in bytes or like `20GiB`.
        current: as for `canonical_device`.

    Raises:
        ArgumentError: it is no dict, a key is not a device, or a value is not a size.
    """
    if not isinstance(max_memory, Mapping):
        raise ArgumentError(f"max_memory is {max_memory!r}; it must be a dict of sizes by device")
    return {
        _limited_device("max_memory", name, current): parse_size("max_memory", size)
        for name, size in max_memory.items()
    }


def _limited_device(argument: str, device: object, current: str = USUAL) -> str:
    try:
        name = canonical_device(device, current)
    except ArgumentError as exc:
        raise ArgumentError(f"{argument}: {exc}") from None
    if name in (META, OFFLOAD):
        raise ArgumentError(f"{argument}: {name} has no memory of its own; limit the cpu's")
    return name


def choose_inventory(
    inventory: object,
    max_memory: Mapping[Any, object] | None,
    needed: Collection[object] | None = None,
) -> Inventory:
    """Return the devices to plan for: the given ones, or else this machine's.

    Args:
        inventory: an `Inventory`, a text for `parse_inventory`, or None.
        max_memory: what may lie on some devices at most, as for accelerate: limits for weights, so
            nothing is left to activations. Without an inventory, the accelerators that it names are
            the only ones.
        needed: as for `machine_inventory`.

    Raises:
        ArgumentError: one of them cannot be read.
        ArgumentError: `max_memory` names an accelerator that is not there.
    """
    if isinstance(inventory, str):
        inventory = parse_inventory(inventory)
    if inventory is not None and not isinstance(inventory, Inventory):
        raise ArgumentError(
            f"inventory is {inventory!r}; write it as '2x24GiB' or 'cuda:0=24GiB,cpu=64GiB'"
        )
    # If the limits are given, no device is asked.
    here = inventory or machine_inventory(needed if max_memory is None else ())
    if max_memory is None:
        return here
    limits = parse_max_memory(max_memory, here.current)
    for name in limits:
        here.require(name, "max_memory")
    found = here.with_devices(_device(name, nbytes) for name, nbytes in limits.items())
    if inventory is not None:
        return found
    used = tuple(each for each in found.devices if each.name in (*limits, CPU))
    return msgspec.structs.replace(found, devices=used, others=())


def machine_inventory(needed: Collection[object] | None = None) -> Inventory:
    """Return this machine's devices; imports torch.

    An accelerator is limited to its free memory. The host is not: weights that stay there are
    there already, and loads look for room themselves.

    Args:
        needed: devices in any usual way; no others are asked, and those are in `others`. None for
            all, as a strategy needs.
    """
    names = kinds.accelerator_names()
    index = kinds.current_index()
    current = f"{kinds.machine_kind() or kinds.USUAL_KIND}:{index}"
    meant = names if needed is None else {canonical_device(each, current) for each in needed}
    asked = [name for name in names if name in meant]
    others = tuple(name for name in names if name not in asked)
    devices = (
        boundless(name) if nbytes is None else _device(name, nbytes, settings().headroom)
        for name, nbytes in kinds.free_nbytes(asked).items()
    )
    return Inventory(others=others, current_index=index).with_devices([*devices, boundless(CPU)])
