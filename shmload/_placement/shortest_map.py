"""The shortest device map that means a placement, to be printed, pasted and planned again."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from shmload._placement.device_map import Devices
from shmload._placement.modules import Component, Module, join

_Entries = tuple[tuple[str, str], ...]
"""Of a device map: paths or patterns, each with its device."""


def shorten(components: Sequence[Component], devices: Devices, main: Mapping[str, str]) -> Devices:
    """Return the shortest device map that `expand` turns into the same devices.

    It names every component, so that each can be read and changed by itself.

    Args:
        components: of the pipeline.
        devices: of every unit.
        main: by component, the device that its own entry has if several are equally short.
    """
    entries: list[tuple[str, str]] = []
    for component in components:
        tree = _Labelled(component.module, component.name, devices)
        choices = sorted(tree.used, key=lambda device: (device != main[component.name], device))
        options: list[_Entries] = [
            ((component.name, device), *tree.write(device)) for device in choices
        ]
        shortest: _Entries = min(options, key=len)
        entries += shortest
    return dict(entries)


def print_device_map(device_map: Mapping[str, str]) -> str:
    """Write a device map as Python code that can be pasted."""
    lines = (f'    "{path}": "{device}",\n' for path, device in device_map.items())
    return f"device_map = {{\n{''.join(lines)}}}"


class _Labelled:
    """A module whose units have devices; finds the fewest entries that say so."""

    def __init__(self, module: Module, path: str, devices: Devices) -> None:
        self.name = module.name
        self.path = path
        below = () if module.is_unit else module.children
        self.children = [_Labelled(child, join(path, child.name), devices) for child in below]
        self.used: frozenset[str] = frozenset().union(*(child.used for child in self.children))
        if module.is_unit:
            self.used = frozenset({devices[path]})
        self._written: dict[str, _Entries] = {}

    def write(self, inherited: str) -> _Entries:
        """Return the fewest entries for the children, given the device that they inherit."""
        if self.used == {inherited}:
            return ()
        if inherited not in self._written:
            groups = itertools.groupby(self.children, key=_group)
            parts = (
                _write_numbers(self.path, list(children), device, inherited)
                if device
                else next(children).write_whole(inherited)
                for (device, _), children in groups
            )
            self._written[inherited] = tuple(itertools.chain(*parts))
        return self._written[inherited]

    def write_whole(self, inherited: str) -> _Entries:
        """Return the fewest entries for this module, given the device that it inherits."""
        if self.used == {inherited}:
            return ()
        options = [
            ((self.path, device), *self.write(device)) for device in sorted(self.used - {inherited})
        ]
        # The first of equally short options wins: it names this module, not all of its children.
        return min([*options, self.write(inherited)], key=len) if self.children else options[0]


def _group(child: _Labelled) -> tuple[str, str]:
    """Return a child's key for `groupby`: equal for numbered neighbours on one device."""
    if child.name.isdecimal() and len(child.used) == 1:
        return next(iter(child.used)), ""
    return "", child.path


def _write_numbers(path: str, children: list[_Labelled], device: str, inherited: str) -> _Entries:
    if device == inherited:
        return ()
    patterns = number_patterns([child.name for child in children])
    return tuple((join(path, pattern), device) for pattern in patterns)


def number_patterns(numbers: Iterable[str]) -> list[str]:
    """Return patterns that match these numbers and no others, such as `1[0-5]`."""
    by_start: dict[str, list[str]] = {}
    for number in numbers:
        by_start.setdefault(number[:-1], []).append(number[-1])
    by_end: dict[str, list[str]] = {}
    for start, digits in by_start.items():
        by_end.setdefault(_class_of(digits), []).append(start)
    patterns = []
    for end, starts in by_end.items():
        # 10 to 19 and 20 to 29 are [12][0-9].
        same = [start for start in starts if len(start) == 1]
        if len(same) > 1:
            patterns.append(_class_of(same) + end)
            starts = [start for start in starts if len(start) != 1]
        patterns += [start + end for start in starts]
    return sorted(patterns, key=lambda pattern: (len(re.sub(r"\[.*?\]", "0", pattern)), pattern))


def _class_of(digits: Sequence[str]) -> str:
    digits = sorted(digits)
    if len(digits) == 1:
        return digits[0]
    is_range = len(digits) > 2 and int(digits[-1]) - int(digits[0]) == len(digits) - 1
    return f"[{digits[0]}-{digits[-1]}]" if is_range else f"[{''.join(digits)}]"
