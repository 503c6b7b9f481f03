"""A device map as users write it, the device of every module that it means, and its shortest form.

    "balanced"                                                  a strategy
    "cuda:1"                                                    a device for all
    {"text_encoder*": 1, "": 0}                                 a pattern; all the rest
    {"transformer": {"": 0, "transformer_blocks.0": 1}}         nested
    {"transformer.single_transformer_blocks.[0-9]": "offload"}  a dotted path, with a pattern

A module gets the device of the key that matches it, or else the device of its parent. If several
keys match, the one with the most characters besides wildcards wins; an exact name beats a pattern.
"""

import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from shmload._placement.inventory import USUAL, Inventory, canonical_device
from shmload._placement.modules import Component, Module, join, parent_of
from shmload._wording import listed, nearest
from shmload.errors import ArgumentError, UnknownComponent

STRATEGIES = ("balanced", "balanced_low_0", "sequential", "auto")

_WILDCARDS = re.compile(r"\[[^\]]*\]|[*?]")

# Far deeper than the modules of any model, in levels.
_MAX_DEPTH = 100

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
        ArgumentError: it has none of these forms, or names a device that is not there.
    """
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return device_map
    is_all = not isinstance(device_map, Mapping)
    found = {}
    for path, value in entries_of(device_map):
        found[path] = device = parse_device(value, inventory.current, is_all=is_all)
        inventory.require(device)
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
            raise ArgumentError(f"device_map: its key {key!r} is not a component or module")
        yield from entries_of(value, join(above, key), depth + 1)


def parse_device(value: object, current: str = USUAL, *, is_all: bool = False) -> str:
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
        return canonical_device(value, current, others=STRATEGIES if is_all else ())
    except ArgumentError as exc:
        raise ArgumentError(f"device_map: {exc}") from None


# What a map means ---------------------------------------------------------------------------------


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
    named = (msgspec.structs.replace(each.module, name=each.name) for each in components)
    is_alone = len(components) == 1 and not components[0].name
    pipeline = components[0].module if is_alone else parent_of("", tuple(named))
    keys = [_Key(path, tuple(path.split(".")) if path else (), d) for path, d in device_map.items()]
    for key in keys:
        _require_match(key, pipeline, is_alone=is_alone)
    devices = dict(_spread(pipeline, "", 0, keys, ""))
    missing = [
        path or "the model"
        for each in components
        for path, device in merge(each.module, each.name, devices).items()
        if not device
    ]
    if missing:
        more = f" and {len(missing) - 6} more" * (len(missing) > 6)
        some = ", ".join(missing[:6]) + more
        raise ArgumentError(f'device_map: it says nothing of {some}; a default is {{"": "cpu"}}')
    _require_ties(devices, components)
    return devices


def _matches(name: str, pattern: str) -> bool:
    """Tell whether a key of a map, or a part of it between dots, means a name."""
    return name == pattern or fnmatch.fnmatchcase(name, pattern)


def _spread(
    module: Module, path: str, depth: int, keys: Iterable[_Key], inherited: str
) -> Iterator[tuple[str, str]]:
    """Yield the device of every unit of a module; empty if no key gives one.

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
        for key in below:
            if key.device != device and _has_below(module, key.names[depth:]):
                part = f"{key.path} would be on {key.device}"
                raise ArgumentError(f"device_map: {path} must stay whole, but {part}; give it one")
        yield path, device
        return
    for child in module.children:
        matching = [key for key in below if _matches(child.name, key.names[depth])]
        yield from _spread(child, join(path, child.name), depth + 1, matching, device)


def _has_below(module: Module, names: Sequence[str]) -> bool:
    """Tell whether names, which may be patterns, lead from a module to one below it."""
    return not names or any(
        _matches(child.name, names[0]) and _has_below(child, names[1:]) for child in module.children
    )


def _require_match(key: _Key, pipeline: Module, *, is_alone: bool) -> None:
    """Raise UnknownComponent or ArgumentError if a key matches no module.

    The error lists the names where the key stops matching.
    """
    found = [pipeline]
    for depth, name in enumerate(key.names):
        children = [child for module in found for child in module.children]
        found = [child for child in children if _matches(child.name, name)]
        if not found:
            known = list(dict.fromkeys(child.name for child in children))
            there = f"it has {listed(known)}" if known else "it cannot be divided"
            what = f"{name!r}; {there}{nearest(name, known)}"
            if depth == 0 and not is_alone:
                raise UnknownComponent(f"the pipeline has no component {what}", name=name)
            above = ".".join(key.names[:depth]) or "the model"
            raise ArgumentError(f"device_map names {key.path!r}, but {above} has no module {what}")


def _require_ties(devices: Devices, components: Sequence[Component]) -> None:
    """Raise ArgumentError if modules that share a tensor are on several devices."""
    for component in components:
        for tie in component.ties:
            homes = {unit: devices[unit] for unit in tied_units(component, tie)}
            if len(set(homes.values())) > 1:
                places = ", ".join(f"{path} on {device}" for path, device in homes.items())
                raise ArgumentError(f"device_map: these share a tensor: {places}; give them one")


def tied_units(component: Component, tie: Sequence[str]) -> list[str]:
    """Return the dotted paths of the units that contain the modules of a tie."""
    paths = [path for path, _ in component.module.units()]
    found = [next(p for p in paths if not p or f"{name}.".startswith(f"{p}.")) for name in tie]
    return [join(component.name, path) for path in dict.fromkeys(found)]


def merge(module: Module, path: str, devices: Devices) -> Devices:
    """Return the devices of the largest modules that are on one device each, in order."""
    used = _used(module, path, devices)
    if len(used) == 1:
        return {path: used.pop()}
    merged: Devices = {}
    for child in module.children:
        merged |= merge(child, join(path, child.name), devices)
    return merged


# What a map is written as -------------------------------------------------------------------------


def shorten(components: Sequence[Component], devices: Devices) -> Devices:
    """Return a short device map that `expand` turns into the same devices.

    It names every component, so that each can be read and changed by itself.

    Args:
        components: of the pipeline.
        devices: of every unit.
    """
    entries = (_entries(each.module, each.name, devices, "") for each in components)
    return dict(itertools.chain(*entries))


def _entries(
    module: Module, path: str, devices: Devices, inherited: str
) -> Iterator[tuple[str, str]]:
    """Yield paths or patterns, each with its device, for what is not on the inherited device."""
    used = _used(module, path, devices)
    children = () if module.is_unit else module.children
    homes = {child.name: _used(child, join(path, child.name), devices) for child in children}
    # Most of the children that are on one device each are there.
    counts = Counter(min(h) for h in homes.values() if len(h) == 1)
    likely = inherited if inherited in used else min(used)
    usual = max(counts, key=lambda d: (counts[d], d == inherited), default=likely)
    if usual != inherited:
        yield path, usual
    if len(used) == 1:
        return
    alike: dict[str, list[str]] = {}
    for child in children:
        if child.name.isdecimal() and len(homes[child.name]) == 1:
            alike.setdefault(min(homes[child.name]), []).append(child.name)
        else:
            yield from _entries(child, join(path, child.name), devices, usual)
    for device, numbers in alike.items():
        if device != usual:
            yield from ((join(path, pattern), device) for pattern in number_patterns(numbers))


def _used(module: Module, path: str, devices: Devices) -> set[str]:
    return {devices[join(path, unit)] for unit, _ in module.units()}


def number_patterns(numbers: Iterable[str]) -> list[str]:
    """Return patterns that match these numbers and no others, such as `1[0-5]`."""
    by_start: dict[str, list[str]] = {}
    for number in numbers:
        by_start.setdefault(number[:-1], []).append(number[-1])
    patterns = []
    for start, digits in by_start.items():
        first, last = min(digits), max(digits)
        is_range = len(digits) > 2 and int(last) - int(first) == len(digits) - 1
        each = f"[{first}-{last}]" if is_range else f"[{''.join(sorted(digits))}]"
        patterns.append(start + (first if first == last else each))
    return patterns
