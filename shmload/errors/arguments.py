"""The errors of arguments."""

from collections.abc import Iterable, Sequence
from os import PathLike

from shmload._wording import listed, nearest
from shmload.errors.base import ShmloadError

_Path = str | PathLike[str]


class ArgumentError(ShmloadError, ValueError):
    """An argument has a value that cannot work."""


class UnknownArgument(ArgumentError, TypeError):
    """A keyword argument is given that nothing takes."""

    def __init__(self, name: str, functions: Sequence[str], known: Iterable[str]) -> None:
        self.name = name
        first, *others = functions
        rest = f", nor has {' or '.join(others)}" if others else ""
        super().__init__(f"{first} has no argument {name!r}{rest}{nearest(name, sorted(known))}")


class UnknownDtype(ArgumentError):
    """A dtype name is not one that torch and safetensors share."""

    def __init__(
        self, dtype: object, known: Iterable[str], short_names: Iterable[str] = ()
    ) -> None:
        self.dtype = dtype
        known = list(known)
        hint = nearest(str(dtype).removeprefix("torch."), [*known, *short_names])
        super().__init__(f"unknown dtype {dtype!r}; use one of {', '.join(known)}{hint}")


class UnknownComponent(ArgumentError):
    """A component is named that the pipeline does not have."""

    def __init__(self, name: str, source: _Path, known: Iterable[str]) -> None:
        self.name = name
        known = sorted(known)
        super().__init__(
            f"{source} has no component {name!r}; it has {', '.join(known)}{nearest(name, known)}"
        )


class UnknownModule(ArgumentError):
    """A device map names a module that its component does not have.

    Attributes:
        path: the path in the device map.
        known: the modules that exist at that place.
    """

    def __init__(self, path: str, above: str, name: str, known: Sequence[str]) -> None:
        self.path = path
        self.known = tuple(known)
        where = above or "the model"
        there = f"it has {listed(known)}" if known else "it cannot be divided"
        super().__init__(
            f"device_map names {path!r}, but {where} has no module {name!r}; "
            f"{there}{nearest(name, known)}"
        )


class DeviceMapMalformed(ArgumentError):
    """A device map cannot be read, or cannot work."""

    def __init__(self, reason: str, argument: str = "device_map") -> None:
        super().__init__(f"{argument}: {reason}")


class DeviceMissing(DeviceMapMalformed):
    """A device map, or `max_memory`, names a device that is not there.

    Attributes:
        device: the device, such as `cuda:0`.
        devices: the devices that there are.
    """

    def __init__(self, device: str, devices: Sequence[str], argument: str = "device_map") -> None:
        self.device = device
        self.devices = tuple(devices)
        super().__init__(
            f"it names {device}, and the devices are {', '.join(devices)}; take one of "
            "these, or plan for others with `shmload plan SOURCE --inventory 2x24GiB`",
            argument,
        )


class DeviceUnsupported(ArgumentError):
    """Weights cannot be copied to a kind of device.

    Attributes:
        device: the device, such as `npu:0`.
        lacks: what is missing for it, such as `torch.Stream`; empty if it takes no copies at all.
    """

    def __init__(self, device: str, reason: str, remedy: str, lacks: str = "") -> None:
        self.device = device
        self.lacks = lacks
        super().__init__(f"shmload cannot copy weights to {device}: {reason}; {remedy}")
