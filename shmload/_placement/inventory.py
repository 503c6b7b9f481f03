"""The devices and how much each holds: this machine's, or invented ones to plan for another.

A device has one name everywhere: `cuda:0`, `cpu`, `disk`. A device map has two more targets:
`meta` holds nothing; `offload` is the CPU's memory for weights that an accelerator computes with
(with weights on `cpu` the CPU computes).
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from shmload._host.procfs import cgroup_free_nbytes, machine_free_nbytes
from shmload._runtimes import kinds
from shmload._settings import parse_nbytes, settings
from shmload._wording import nearest
from shmload.errors import ArgumentError

CPU, DISK, META, OFFLOAD = "cpu", "disk", "meta", "offload"
_WITHOUT_INDEX = (CPU, DISK, META, OFFLOAD)
_BOUNDLESS_NBYTES = 1 << 62
_USUAL = f"an index, {kinds.USUAL_KIND}:0, {', '.join(_WITHOUT_INDEX)}"
_NAME = re.compile(r"([a-z][a-z_]*)(?::(\d+))?")
_BARE = re.compile(r"0*[1-9]\d{0,5}")
_MAX_DEVICES = 1024  # no machine has more
_COUNTED = re.compile(r"(\d+)\s*x\s*(.+)")


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


class Current(msgspec.Struct, frozen=True):
    """The accelerator that is meant by a name which leaves out the kind or the index."""

    kind: str = kinds.USUAL_KIND
    index: int = 0


USUAL = Current()


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Devices, accelerators first and by index.

    An accelerator that is not listed does not exist; `cpu` and `disk` then have no limit.
    """

    devices: tuple[Device, ...]
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
        """Its devices other than `cpu` and `disk`; may be none."""
        return tuple(device for device in self.devices if not is_on_the_host(device.name))

    @property
    def current(self) -> Current:
        """What names mean that leave something out."""
        names = [name for name in self.names if not is_on_the_host(name)]
        kind = names[0].partition(":")[0] if names else kinds.USUAL_KIND
        return Current(kind, self.current_index)

    def with_devices(self, devices: Iterable[Device]) -> "Inventory":
        """Return an inventory that also has these, or has them instead of those of their name."""
        found = {device.name: device for device in (*self.devices, *devices)}
        return msgspec.structs.replace(self, devices=_in_order(found.values()))

    def find(self, name: str) -> Device | None:
        """Return a device by its name; None if it is not listed."""
        return next((device for device in self.devices if device.name == name), None)

    def __str__(self) -> str:
        return ", ".join(device.name for device in self.devices)


def canonical_device(device: object, current: Current = USUAL) -> str:
    """Return the one name of a device, given in any usual way.

    Args:
        device: an index, a `torch.device`, or a name such as `cuda:1`, `cuda`, `cpu`, `offload`.
        current: what it means if it leaves something out.

    Raises:
        ArgumentError: it is not a device.
    """
    # str(torch.device("cuda", 1)) is "cuda:1": no need to import torch.
    text = str(device).strip().lower()
    if text.isdecimal() and not isinstance(device, bool | float):
        return f"{current.kind}:{int(text)}"
    match = _NAME.fullmatch(text)
    if match is None or isinstance(device, bool) or device is None:
        raise ArgumentError(f"{device!r} is not a device ({_USUAL})")
    found, index = match.groups()
    if found in _WITHOUT_INDEX:
        return found
    if found != current.kind and not kinds.is_known(found):
        meant = kinds.meant_kind(found)
        hint = (
            f"; did you mean {meant!r}?"
            if meant
            else nearest(found, (*kinds.KINDS, *_WITHOUT_INDEX))
        )
        raise ArgumentError(f"{device!r} is not a device ({_USUAL}){hint}")
    return f"{found}:{int(index or (current.index if found == current.kind else 0))}"


def parse_inventory(text: str) -> Inventory:
    """Read an invented inventory, such as `2x24GiB` or `cuda:0=20GiB,cuda:1=24GiB,cpu=64GiB`.

    A size without a name is the next accelerator's, `2x` that of the next two. The setting
    `headroom` says which fraction of each accelerator's memory is left to activations.

    Raises:
        ArgumentError: it cannot be read; the message says how to write it.
    """
    found: dict[str, int] = {}
    try:
        for item in text.split(","):
            for name, size in _named_sizes(item.strip(), len(found)):
                if name in found:
                    raise ArgumentError(f"{text!r} has {name} twice")
                if _BARE.fullmatch(size.strip()):  # bytes, less than one MB of them
                    raise ArgumentError(f"{size.strip()!r} has no unit; write {size.strip()}GiB")
                found[name] = _nbytes(size, "24GiB, 2x24GiB or cuda:1=24GiB")
    except ArgumentError as exc:
        raise ArgumentError(f"inventory: {exc}") from None
    headroom = settings().headroom
    return Inventory(devices=()).with_devices(
        _device(name, nbytes, headroom) for name, nbytes in found.items()
    )


def _named_sizes(item: str, index: int) -> list[tuple[str, str]]:
    name, equals, size = item.partition("=")
    if equals:
        return [(_held(name), size)]
    counted = _COUNTED.fullmatch(item)
    count, size = (int(counted[1]), counted[2]) if counted else (1, item)
    if not 1 <= count <= _MAX_DEVICES:
        raise ArgumentError(
            f"{item!r}: there are 1 to {_MAX_DEVICES} devices; write 1x{size} for one"
        )
    return [(f"{kinds.USUAL_KIND}:{index + number}", size) for number in range(count)]


def limit_inventory(
    max_memory: Mapping[Any, object], inventory: Inventory | None = None
) -> Inventory:
    """Limit what may lie on some devices, as accelerate's `max_memory` does.

    Args:
        max_memory: by index, name or `torch.device`; sizes in bytes or like `20GiB`. These are
            limits for weights, so nothing is left to activations.
        inventory: its other devices keep their limits; None for a machine that has the named
            devices and no others.

    Raises:
        ArgumentError: `max_memory` cannot be read; as `parse_max_memory`.
        ArgumentError: it names an accelerator that the inventory does not have.
    """
    limits = parse_max_memory(max_memory, inventory.current if inventory else USUAL)
    for name in limits:
        if inventory and name not in (CPU, DISK) and inventory.find(name) is None:
            raise device_missing(name, inventory.names, argument="max_memory")
    return (inventory or Inventory(devices=())).with_devices(
        _device(name, nbytes) for name, nbytes in limits.items()
    )


def parse_max_memory(max_memory: Mapping[Any, object], current: Current = USUAL) -> dict[str, int]:
    """Return the limits of some devices in bytes, by name.

    Args:
        max_memory: as for `limit_inventory`.
        current: as for `canonical_device`.

    Raises:
        ArgumentError: it is no dict, a key is not a device, or a value is not a size.
    """
    if not isinstance(max_memory, Mapping):
        raise ArgumentError(f"max_memory is {max_memory!r}; it must be a dict of sizes by device")
    try:
        return {
            _held(name, current): _nbytes(size, "20GiB, or a number of bytes")
            for name, size in max_memory.items()
        }
    except ArgumentError as exc:
        raise ArgumentError(f"max_memory: {exc}") from None


def choose_inventory(
    inventory: object,
    max_memory: Mapping[Any, object] | None,
    needed: Collection[object] | None = None,
) -> Inventory:
    """Return the devices to plan for: the given ones, or else this machine's.

    Args:
        inventory: an `Inventory`, a text for `parse_inventory`, or None.
        max_memory: for `limit_inventory`; without an inventory, the accelerators that it names are
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
    if inventory is not None:
        return inventory if max_memory is None else limit_inventory(max_memory, inventory)
    if max_memory is None:
        return machine_inventory(needed)
    here = machine_inventory(())  # the limits are given: no device is asked
    here = here.with_devices(map(boundless, here.others))
    named = {*parse_max_memory(max_memory, here.current), CPU, DISK}
    used = (each for each in limit_inventory(max_memory, here).devices if each.name in named)
    return msgspec.structs.replace(here, devices=tuple(used), others=())


def without_host_limits(inventory: Inventory, max_memory: Mapping[Any, object] | None) -> Inventory:
    """Drop the limit of the CPU unless the caller has set one: the weights are there already."""
    if CPU in parse_max_memory(max_memory or {}, inventory.current):
        return inventory
    return inventory.with_devices([boundless(CPU)])


def machine_inventory(needed: Collection[object] | None = None) -> Inventory:
    """Return this machine's devices, each limited to its free memory; imports torch.

    Args:
        needed: devices in any usual way; no others are asked, and those are in `others`. None for
            all, as a strategy needs.
    """
    names = kinds.accelerator_names()
    current = Current(kinds.machine_kind() or kinds.USUAL_KIND, kinds.current_index())
    asked = list(names)
    if needed is not None:
        wanted = {canonical_device(device, current) for device in needed}
        asked = [name for name in names if name in wanted]
    free = [cgroup_free_nbytes(), machine_free_nbytes()]
    host = min(nbytes for nbytes in free if nbytes is not None)
    headroom = settings().headroom
    devices = (
        boundless(name) if nbytes is None else _device(name, nbytes, headroom)
        for name, nbytes in (*kinds.free_nbytes(asked).items(), (CPU, host))
    )
    return Inventory(
        devices=_in_order(devices),
        others=tuple(name for name in names if name not in asked),
        current_index=current.index,
    )


def _in_order(devices: Iterable[Device]) -> tuple[Device, ...]:
    def sort_key(device: Device) -> tuple[bool, str, int]:
        kind, _, index = device.name.partition(":")
        return is_on_the_host(device.name), kind, int(index or 0)

    return tuple(sorted(devices, key=sort_key))


def _held(device: object, current: Current = USUAL) -> str:
    name = canonical_device(device, current)
    if name in (META, OFFLOAD):
        raise ArgumentError(f"{name} has no memory of its own to limit; it takes the cpu's")
    return name


def parse_size(argument: str, value: object) -> int:
    """Read a number of bytes, or a size such as `512MiB`.

    Args:
        argument: for the error.
        value: of the argument.

    Raises:
        ArgumentError: it is neither.
    """
    try:
        return parse_nbytes(str(value))
    except ValueError as exc:
        raise ArgumentError(f"{argument}: {exc}") from exc


def _nbytes(size: object, usual: str) -> int:
    try:
        if isinstance(size, str):
            return parse_nbytes(size)
        if isinstance(size, int | float) and not isinstance(size, bool) and size >= 0:
            return int(size)
    except (ValueError, OverflowError):
        pass
    raise ArgumentError(f"{size!r} is not the size of a device; write {usual}")


def device_missing(
    device: str, devices: Sequence[str], argument: str = "device_map"
) -> ArgumentError:
    """Return the error for a device that is not there.

    Args:
        device: such as `cuda:0`.
        devices: those that there are.
        argument: the one that names it.
    """
    return ArgumentError(
        f"{argument}: it names {device}, and the devices are {', '.join(devices)}; take one of "
        "these, or plan for others with `shmload plan SOURCE --inventory 2x24GiB`",
        device=device,
    )
