"""Whether a device map fits what is loaded: said before a weight is decoded, where that can be.

The names of stored tensors tell that nearly every right map fits; this takes no import, and
decoding begins. Where they do not, the classes are asked first, which takes the import of the
libraries: a wrong map decodes nothing. One question may be left until the libraries are imported
beside the workers: how much of an accelerator is free. If that ends the load, its memory goes.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping

from shmload._building.makers import Maker, is_left_to_library
from shmload._checkpoints.source import Checkpoint, Source, components_with_weights
from shmload._devices.destination import Destination
from shmload._loading.progress import Step, Steps
from shmload._loading.shard import stored_sizes
from shmload._placement.device_map import STRATEGIES, entries_of, matches, parse_device
from shmload._placement.inventory import (
    CPU,
    Inventory,
    boundless,
    is_on_the_host,
    limit_inventory,
    parse_max_memory,
    without_host_limits,
)
from shmload._placement.modules import Component, Module, component_from_names
from shmload._placement.placement import place
from shmload._runtimes.kinds import may_have_accelerators
from shmload.errors import ShmloadError, UnknownComponent


class Fit:
    """Checks the destination of one load.

    Args:
        source: as it was found.
        maker: of the pipeline or model.
        dtype: as given to `load_pipeline`.
        kwargs: for `from_pretrained`; models among them are placed too.
        destination: to check.
    """

    def __init__(
        self,
        source: Source,
        maker: Maker,
        dtype: object,
        kwargs: Mapping[str, object],
        destination: Destination,
    ) -> None:
        self._source = source
        self._maker = maker
        self._dtype = dtype
        self._passed = {name: value for name, value in kwargs.items() if _is_module(value)}
        self._destination = destination
        # One file may hold a whole pipeline: only its class knows which components.
        is_opaque = maker.is_of_pipelines and not source.is_pipeline
        self._is_settled = is_opaque or not (source.checkpoints or self._passed)

    def require_early(self, steps: Steps) -> None:
        """Check what can be checked before anything is decoded.

        Args:
            steps: count the time of imports.

        Raises:
            UnknownComponent, UnknownModule, DeviceMapMalformed, DeviceMissing, DoesNotFit: as
                `place`.
            ArgumentError: weights wait on a disk without a folder.
        """
        if self._is_settled:
            return
        self._require_components()
        inventory = self._known_inventory()
        is_wrong = inventory is not None and not self._fits_names(self._source, inventory)
        if is_wrong or (self._may_part_ties and "diffusers" in sys.modules):
            with steps.during(Step.IMPORTING, "importing the libraries to check device_map"):
                taken = self._maker.import_classes(self._source)
            self._require_classes(taken)
        elif not self._may_part_ties:
            self._is_settled = _is_torch_here() or not may_have_accelerators()

    def require(self, taken: Source) -> None:
        """Check the rest, now that the libraries are imported; a second call does nothing.

        Args:
            taken: the source as its classes take it.

        Raises:
            As `require_early`.
        """
        if self._is_settled:
            return
        inventory = self._known_inventory()
        if self._may_part_ties or inventory is None or not self._fits_names(taken, inventory):
            self._require_classes(taken)
        self._is_settled = True

    @property
    def _may_part_ties(self) -> bool:
        """Whether the map divides a component with tied tensors, which files have once."""
        others = {
            each.component for each in self._source.checkpoints if each.library != "diffusers"
        }
        return _reaches_into(self._destination.device_map, others)

    def _require_components(self) -> None:
        """Raise UnknownComponent if the map names a component that nothing will have."""
        if not self._source.is_pipeline or not isinstance(self._destination.device_map, Mapping):
            return
        known = {*_names(self._source), *self._passed}
        for name in self._destination.device_map:
            component = str(name).partition(".")[0]
            if component and not any(matches(each, component) for each in known):
                raise UnknownComponent(component, self._source.given, known)

    def _known_inventory(self) -> Inventory | None:
        """Return the devices as far as they are known without importing torch; None if unknown."""
        device_map, limits = self._destination.device_map, self._destination.max_memory
        if _is_torch_here():
            return self._destination.inventory()
        host = boundless(CPU)
        if not may_have_accelerators():
            here = Inventory(devices=(host,))
            return limit_inventory(limits, here) if limits else here
        if limits and any(not is_on_the_host(name) for name in parse_max_memory(limits)):
            return without_host_limits(limit_inventory(limits), limits)
        if device_map in STRATEGIES:
            return None
        named = {parse_device(device) for _, device in entries_of(device_map)}
        devices = (boundless(name) for name in sorted(named) if not is_on_the_host(name))
        return Inventory(devices=(*devices, host))

    def _fits_names(self, source: Source, inventory: Inventory) -> bool:
        """Tell whether the map certainly fits, by the names of the stored tensors."""
        if _left_to_library(source).difference(self._passed):
            return False  # only the classes know what the files hold
        try:
            has_limits = any(not each.is_boundless for each in inventory.devices)
            components = [
                *(self._by_names(each, has_limits=has_limits) for each in source.checkpoints),
                *self._passed_components(),
            ]
            self._require(components, inventory)
        except ShmloadError:
            return False
        return True

    def _by_names(self, checkpoint: Checkpoint, *, has_limits: bool) -> Component:
        """Describe a component by its headers, with no more than the map needs to know."""
        name = checkpoint.component
        is_divided = _may_divide(self._destination.device_map)
        if not (is_divided or has_limits):
            return Component(name=name, module=Module(name="", nbytes=0, is_whole=True))
        tensors = stored_sizes(checkpoint, self._maker.likely_rule(checkpoint, self._dtype))
        if is_divided:
            return component_from_names(name, tensors)
        nbytes = sum(size for _, size in tensors)
        return Component(name=name, module=Module(name="", nbytes=nbytes, is_whole=True))

    def _passed_components(self) -> Iterator[Component]:
        """Yield the models that the caller passes in; torch is there if there is one."""
        for name, model in self._passed.items():
            from shmload._building.module_trees import component_of

            yield component_of(name, model)  # type: ignore[arg-type]  # `_is_module` looked

    def _require_classes(self, taken: Source) -> None:
        """Check with the modules that the classes have; the libraries are imported."""
        # Not at the top: it imports torch.
        from shmload._building.module_trees import components_of

        # For a model of transformers `auto` is the dtype that sizes are computed with anyway.
        is_theirs = not self._source.is_pipeline and is_left_to_library(self._dtype)
        dtype = None if is_theirs else self._dtype
        described = (
            *components_of(taken, dtype, only=_names(taken)),
            *self._passed_components(),
        )
        opaque = {each.name for each in described if each.module.is_unit}
        self._is_settled = True
        if _reaches_into(self._destination.device_map, opaque):
            return  # a class of no known library: its modules are known when it is built
        self._require(described, self._destination.inventory())

    def _require(self, components: Iterable[Component], inventory: Inventory) -> None:
        order = {name: place for place, name in enumerate(self._destination.order)}
        ordered = sorted(components, key=lambda each: order.get(each.name, len(order)))
        placement = place(ordered, self._destination.device_map, inventory)
        self._destination.require_possible(placement)


def _names(source: Source) -> set[str]:
    """Return the components whose weights are loaded, by shmload or by the library."""
    return {each.component for each in source.checkpoints} | _left_to_library(source)


def _left_to_library(source: Source) -> set[str]:
    """Return the components whose weights shmload does not read."""
    if not source.is_pipeline or not source.unread:
        return set(source.unread)
    return components_with_weights(source).intersection(source.unread)


def _is_module(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _is_torch_here() -> bool:
    return "torch" in sys.modules


def _may_divide(device_map: object) -> bool:
    """Tell whether a map divides components, or may do so."""
    if not isinstance(device_map, Mapping):
        return device_map in STRATEGIES
    return any("." in path for path, _ in entries_of(device_map))


def _reaches_into(device_map: object, components: Collection[str]) -> bool:
    """Tell whether a map has a key below one of some components."""
    if not isinstance(device_map, Mapping):
        return False
    for path, _ in entries_of(device_map):
        first, _, rest = path.partition(".")
        if "" in components and first:  # a model by itself
            return True
        if rest and any(matches(each, first) for each in components):
            return True
    return False
