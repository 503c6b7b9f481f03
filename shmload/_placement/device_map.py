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

from shmload._placement.inventory import (
    USUAL,
    Current,
    Inventory,
    canonical_device,
    device_missing,
    is_on_the_host,
)
from shmload._placement.modules import Component, Module, join, parent_of
from shmload._wording import listed, nearest
from shmload.errors import (
    ArgumentError,
    UnknownComponent,
)

STRATEGIES = ("balanced", "balanced_low_0", "sequential", "auto")

_WILDCARDS = re.compile(r"\[[^\]]*\]|[*?]")

# Far deeper than the modules of any model, in levels.
_MAX_DEPTH = 100
# An error names so many modules at most.
_MOST_LISTED = 6

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
        ArgumentError: it has none of these forms.
        ArgumentError: it names a device that is not there.
    """
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return device_map
    is_all = not isinstance(device_map, Mapping)
    found = {}
    for path, value in entries_of(device_map):
        found[path] = device = parse_device(value, inventory.current, is_all=is_all)
        if not is_on_the_host(device) and inventory.find(device) is None:
            raise device_missing(device, inventory.names)
    return found


def entries_of(device_map: object, above: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the devices that a map names, each with the dotted path that leads to it.

    Raises:
        ArgumentError: a key is not a text; or it is deeper than any model, or contains itself.
    """
    if not isinstance(device_map, Mapping):
        yield above, device_map
        return
    if depth == _MAX_DEPTH:
        raise ArgumentError(f"device_map: it is nested more than {_MAX_DEPTH} levels deep")
    for key, value in device_map.items():
        if not isinstance(key, str):
            raise ArgumentError(
                f"device_map: its key {key!r} is not the name of a component or module"
            )
        yield from entries_of(value, join(above, key), depth + 1)


def parse_device(value: object, current: Current = USUAL, *, is_all: bool = False) -> str:
    """Return the name of a device that a map names; this machine need not have it.

    Args:
        value: the device.
        current: as for `canonical_device`.
        is_all: it is the whole map, and might have been meant as a strategy.

    Raises:
        ArgumentError: it is no device, or it is a strategy.
    """
    if value in STRATEGIES:
        raise ArgumentError(f"device_map: {value!r} is for a whole pipeline, not for a part of it")
    try:
        return canonical_device(value, current)
    except ArgumentError as exc:
        strategies = f", nor a strategy ({', '.join(STRATEGIES)})" if is_all else ""
        reason, mark, hint = str(exc).partition("; did you mean")
        hint = f"{mark}{hint}" or nearest(str(value), STRATEGIES)
        raise ArgumentError(f"device_map: {reason}{strategies}{hint}") from None


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
        UnknownComponent, ArgumentError: a key matches nothing; the message lists the names.
        ArgumentError: a module gets no device; or several devices for a module that must stay
            whole, or for modules that share a tensor.
    """
    pipeline = pipeline_of(components)
    keys = [_Key(path, tuple(path.split(".")) if path else (), d) for path, d in device_map.items()]
    for key in keys:
        _require_match(key, pipeline, components)
    spread = dict(_spread(pipeline, "", 0, keys, None))
    devices = {path: device for path, device in spread.items() if device is not None}
    if len(devices) < len(spread):
        raise ArgumentError(
            f"device_map: it says nothing of {_list(_largest_missing(pipeline, '', devices))}; "
            'a default is {"": "cpu"}'
        )
    _require_ties(devices, components)
    return devices


def _largest_missing(module: Module, path: str, devices: Devices) -> list[str]:
    """Return the paths of the largest modules without a device: components, if they have none."""
    units = [join(path, unit) for unit, _ in module.units()]
    if all(unit in devices for unit in units):
        return []
    if path and not any(unit in devices for unit in units):
        return [path]
    below = [(join(path, child.name), child) for child in module.children]
    return [found for where, child in below for found in _largest_missing(child, where, devices)]


def _list(paths: Sequence[str]) -> str:
    if len(paths) <= _MOST_LISTED:
        return ", ".join(paths)
    return f"{', '.join(paths[:_MOST_LISTED])} and {len(paths) - _MOST_LISTED} more"


def matches(name: str, pattern: str) -> bool:
    """Tell whether a key of a map, or a part of it between dots, means a name."""
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
        _require_undivided(module, path, depth, below, device)
        yield path, device
        return
    for child in module.children:
        matching = [key for key in below if matches(child.name, key.names[depth])]
        yield from _spread(child, join(path, child.name), depth + 1, matching, device)


def _require_undivided(
    module: Module, path: str, depth: int, keys: Sequence[_Key], device: str | None
) -> None:
    """Raise ArgumentError if keys give another device to a part of a whole module."""
    inside = dict(_spread_inside(module, path, depth, keys, device)) if keys else {}
    for unit, other in inside.items():
        if other == device:
            continue
        # Name the part by the largest module that goes there, as the user probably did.
        names, part = unit.split("."), unit
        for count in range(len(names), depth, -1):
            above = ".".join(names[:count])
            own = {where for key, where in inside.items() if f"{key}.".startswith(f"{above}.")}
            part = above if own == {other} else part
        raise ArgumentError(
            f"device_map: {path} must stay whole, but {part} would be on {other or 'no device'} "
            f"and the rest of it on {device or 'none'}; give {path} one device"
        )


def _spread_inside(
    module: Module, path: str, depth: int, keys: Iterable[_Key], device: str | None
) -> Iterator[tuple[str, str | None]]:
    """Yield path and device of each unit inside a whole module, as if it could be divided.

    The caller raises an error if one of them differs from the module's own device.
    """
    for child in module.children:
        matching = [key for key in keys if matches(child.name, key.names[depth])]
        open_child = msgspec.structs.replace(child, is_whole=False)
        yield from _spread(open_child, join(path, child.name), depth + 1, matching, device)


def _require_match(key: _Key, pipeline: Module, components: Sequence[Component]) -> None:
    """Raise UnknownComponent or ArgumentError if a key matches no module.

    The error lists the names where the key stops matching.
    """
    found = [("", pipeline)]
    for depth, name in enumerate(key.names):
        children = [(join(path, c.name), c) for path, module in found for c in module.children]
        matching = [(path, child) for path, child in children if matches(child.name, name)]
        if not matching:
            known = list(dict.fromkeys(child.name for _, child in children))
            if depth == 0 and components[0].name:
                raise UnknownComponent(
                    f"the pipeline has no component {name!r}; it has {', '.join(known)}"
                    f"{nearest(name, known)}",
                    name=name,
                )
            above = ".".join(key.names[:depth]) or "the model"
            there = f"it has {listed(known)}" if known else "it cannot be divided"
            raise ArgumentError(
                f"device_map names {key.path!r}, but {above} has no module {name!r}; "
                f"{there}{nearest(name, known)}"
            )
        found = matching


def _require_ties(devices: Devices, components: Sequence[Component]) -> None:
    """Raise ArgumentError if modules that share a tensor are on several devices."""
    for component in components:
        for tie in component.ties:
            homes = {unit: devices[unit] for unit in tied_units(component, tie)}
            if len(set(homes.values())) > 1:
                places = ", ".join(f"{path} on {device}" for path, device in homes.items())
                raise ArgumentError(
                    f"device_map: these share a tensor and need one device: {places}"
                )


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
