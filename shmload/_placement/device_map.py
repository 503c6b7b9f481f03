"""A device map as users write it, and the device of every module that it means.

    "balanced"                                                  a strategy
    "cuda:1"                                                    a device for all
    {"text_encoder*": 1, "": 0}                                 a pattern; all the rest
    {"transformer": {"": 0, "transformer_blocks.0": 1}}         nested
    {"transformer.single_transformer_blocks.[0-9]": "offload"}  a dotted path, with a pattern

A module gets the device of the key that matches it, or else the device of its parent. If several
keys match, the one with the most characters besides wildcards wins; an exact name beats a pattern.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from shmload._placement.inventory import CPU, DISK, META, OFFLOAD, Inventory, canonical_device
from shmload._placement.modules import Component, Module, join, parent_of
from shmload._wording import nearest
from shmload.errors import (
    ArgumentError,
    DeviceMapMalformed,
    DeviceMissing,
    UnknownComponent,
    UnknownModule,
)

STRATEGIES = ("balanced", "balanced_low_0", "sequential", "auto")

_WILDCARDS = re.compile(r"\[[^\]]*\]|[*?]")

# Far deeper than the modules of any model, in levels.
_MAX_DEPTH = 100

Keys = tuple[object, ...]
Devices = dict[str, str]
"""Devices by dotted path: of every unit of a pipeline (`Module.units`)."""


class _Key(msgspec.Struct, frozen=True):
    """One entry of a device map."""

    path: str
    names: tuple[str, ...]
    device: str

    @property
    def weight(self) -> tuple[int, bool]:
        """If several keys match a module, the one with the largest weight wins."""
        return len(_WILDCARDS.sub("", self.path)), _WILDCARDS.search(self.path) is None


def parse_device_map(device_map: object, inventory: Inventory) -> str | Devices:
    """Parse a device map in any accepted form.

    Args:
        device_map: a strategy, a device, or a dict of devices by component or path, also nested.
        inventory: which devices there are.

    Returns:
        A strategy, or devices by dotted path or pattern.

    Raises:
        DeviceMapMalformed: it has none of these forms.
        DeviceMissing: it names a device that is not there.
    """
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return device_map
    if isinstance(device_map, Mapping):
        return {path: _parse_device(value, inventory) for path, value in _flatten(device_map)}
    return {"": _parse_device(device_map, inventory)}


def _flatten(device_map: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    for keys, value in devices_in(device_map):
        path = ""
        for key in keys:
            if not isinstance(key, str):
                raise DeviceMapMalformed(
                    f"its key {key!r} is not the name of a component or module"
                )
            path = join(path, key)
        yield path, value


def devices_in(device_map: object, above: Keys = ()) -> Iterator[tuple[Keys, object]]:
    """Yield the devices that a map names, each with the keys that lead to it.

    Raises:
        DeviceMapMalformed: it is deeper than any model, or contains itself.
    """
    if not isinstance(device_map, Mapping):
        yield above, device_map
        return
    if len(above) == _MAX_DEPTH:
        raise DeviceMapMalformed(f"it is nested more than {_MAX_DEPTH} levels deep")
    for key, value in device_map.items():
        yield from devices_in(value, (*above, key))


def _parse_device(value: object, inventory: Inventory) -> str:
    if value in STRATEGIES:
        raise DeviceMapMalformed(f"{value!r} is for a whole pipeline, not for a part of it")
    try:
        device = canonical_device(value, inventory.kind)
    except ArgumentError as exc:
        raise DeviceMapMalformed(f"{exc}{nearest(str(value), STRATEGIES)}") from None
    if device not in (CPU, DISK, META, OFFLOAD) and inventory.find(device) is None:
        names = [each.name for each in inventory.devices]
        raise DeviceMissing(device, names, hint_for(value))
    return device


def hint_for(value: object) -> str:
    """Return a hint for an error: what a text was probably meant for; empty if that is unknown."""
    if str(value).partition(":")[0].lower() == "gpu":
        return "; a GPU is called 'cuda', 'cuda:0' or 0"
    return nearest(str(value), STRATEGIES)


def pipeline_of(components: Sequence[Component]) -> Module:
    """Return the pipeline as one module: paths below it are the dotted paths of a device map."""
    if len(components) == 1 and not components[0].name:
        return components[0].module
    return parent_of(
        "", tuple(msgspec.structs.replace(each.module, name=each.name) for each in components)
    )


def expand(device_map: Mapping[str, str], components: Sequence[Component]) -> Devices:
    """Return the device of every unit.

    Args:
        device_map: as `parse_device_map` returns it.
        components: of the pipeline.

    Raises:
        UnknownComponent, UnknownModule: a key matches nothing; the message lists the names.
        DeviceMapMalformed: a module gets no device; or several devices for a module that must stay
            whole, or for modules that share a tensor.
    """
    pipeline = pipeline_of(components)
    keys = [_Key(path, tuple(path.split(".")) if path else (), d) for path, d in device_map.items()]
    for key in keys:
        _require_match(key, pipeline, components)
    devices: Devices = {}
    for path, device in _spread(pipeline, "", 0, keys, None):
        if device is None:
            raise DeviceMapMalformed(f'it says nothing of {path}; a default is {{"": "cpu"}}')
        devices[path] = device
    _require_ties(devices, components)
    return devices


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _spread(
    module: Module, path: str, depth: int, keys: Iterable[_Key], inherited: str | None
) -> Iterator[tuple[str, str | None]]:
    """Yield the device of every unit of a module.

    Args:
        module: the one to go through.
        path: its path.
        depth: the number of names in its path.
        keys: the keys whose first names match its path.
        inherited: the device of the module above.
    """
    here = [key for key in keys if len(key.names) == depth]
    device = max(here, key=lambda key: key.weight).device if here else inherited
    below = [key for key in keys if len(key.names) > depth]
    if module.is_unit:
        for inner, other in _spread_inside(module, path, depth, below, device) if below else ():
            if other != device:
                raise DeviceMapMalformed(
                    f"{path} must stay whole, but {inner} would be on {other} and the rest of it "
                    f"on {device}; give {path} one device"
                )
        yield path, device
        return
    for child in module.children:
        matching = [key for key in below if _matches(child.name, key.names[depth])]
        yield from _spread(child, join(path, child.name), depth + 1, matching, device)


def _spread_inside(
    module: Module, path: str, depth: int, keys: Iterable[_Key], device: str | None
) -> Iterator[tuple[str, str | None]]:
    """Yield path and device of each unit inside a whole module, as if it could be divided.

    The caller raises an error if one of them differs from the module's own device.
    """
    for child in module.children:
        matching = [key for key in keys if _matches(child.name, key.names[depth])]
        open_child = msgspec.structs.replace(child, is_whole=False)
        yield from _spread(open_child, join(path, child.name), depth + 1, matching, device)


def _require_match(key: _Key, pipeline: Module, components: Sequence[Component]) -> None:
    """Raise UnknownComponent or UnknownModule if a key matches no module.

    The error lists the names where the key stops matching.
    """
    found = [("", pipeline)]
    for depth, name in enumerate(key.names):
        children = [(join(path, c.name), c) for path, module in found for c in module.children]
        matching = [(path, child) for path, child in children if _matches(child.name, name)]
        if not matching:
            known = list(dict.fromkeys(child.name for _, child in children))
            if depth == 0 and components[0].name:
                raise UnknownComponent(name, "the pipeline", known)
            raise UnknownModule(key.path, ".".join(key.names[:depth]), name, known)
        found = matching


def _require_ties(devices: Devices, components: Sequence[Component]) -> None:
    """Raise DeviceMapMalformed if modules that share a tensor are on several devices."""
    for component in components:
        for tie in component.ties:
            homes = {unit: devices[unit] for unit in tied_units(component, tie)}
            if len(set(homes.values())) > 1:
                places = ", ".join(f"{path} on {device}" for path, device in homes.items())
                raise DeviceMapMalformed(f"these share a tensor and need one device: {places}")


def tied_units(component: Component, tie: Sequence[str]) -> list[str]:
    """Return the dotted paths of the units that contain the modules of a tie."""
    paths = [path for path, _ in component.module.units()]
    found = [next(p for p in paths if not p or f"{name}.".startswith(f"{p}.")) for name in tie]
    return [join(component.name, path) for path in dict.fromkeys(found)]


def merge(module: Module, path: str, devices: Devices) -> Devices:
    """Return the devices of the largest modules that are on one device each, in order."""
    used = {devices[join(path, unit)] for unit, _ in module.units()}
    if len(used) == 1:
        return {path: used.pop()}
    merged: Devices = {}
    for child in module.children:
        merged |= merge(child, join(path, child.name), devices)
    return merged
