"""Device maps that accelerate and diffusers make for a pipeline, on the meta device.

Accelerate knows one model, so a pipeline is a module with its models as children. Its maps are made
in four ways: for the devices' limits as they are, and for those of `get_balanced_memory`; with the
models in the pipeline's order, and with those first that run at every step. Diffusers' `balanced`
is compared where it places every component on a GPU.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from accelerate.utils import get_balanced_memory, infer_auto_device_map
from diffusers.pipelines.pipeline_loading_utils import _assign_components_to_devices

from shmload._building.module_trees import whole_classes
from shmload._placement.device_map import Devices
from shmload._placement.modules import Component, join

# As much as `infer_auto_device_map` ever wants; without it the disk would take the rest.
_HOST_NBYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class Peer:
    """A placement that another library chose."""

    name: str
    devices: Devices
    """Of every unit, by dotted path; `cpu` for what waits."""
    seconds: float


def peer_plans(
    models: Mapping[str, torch.nn.Module],
    components: tuple[Component, ...],
    rooms: Mapping[str, int],
) -> Iterator[Peer]:
    """Yield the placements of other libraries.

    Args:
        models: of the pipeline by name, on the meta device.
        components: the same, described.
        rooms: limits of the accelerators, in bytes.
    """
    names = dict(enumerate(rooms))
    limits = {index: rooms[name] for index, name in names.items()} | {"cpu": _HOST_NBYTES}
    whole = sorted({name for model in models.values() for name in whole_classes(model)})
    each_step = {component.name for component in components if component.runs_each_step}
    for order, ordered in (
        ("pipeline's order", list(models)),
        ("transformer first", sorted(models, key=lambda name: name not in each_step)),
    ):
        box = torch.nn.Module()
        for name in ordered:
            box.add_module(name, models[name])
        for way in ("as they are", "balanced"):
            began = time.perf_counter()
            allowed = dict(limits)
            if way == "balanced":
                allowed = get_balanced_memory(box, allowed, no_split_module_classes=whole)
            found = infer_auto_device_map(box, allowed, no_split_module_classes=whole)
            seconds = time.perf_counter() - began
            device_map = {path: names.get(device, "cpu") for path, device in found.items()}
            yield Peer(f"accelerate, {way}, {order}", _spread(device_map, components), seconds)
    sizes = {c.name: c.nbytes for c in sorted(components, key=lambda c: -c.nbytes)}
    began = time.perf_counter()
    assigned = _assign_components_to_devices(sizes, {i: limits[i] for i in names})
    seconds = time.perf_counter() - began
    homes = {name: names[i] for i, group in assigned.items() if i in names for name in group}
    if homes.keys() == sizes.keys():
        yield Peer("diffusers, balanced", _spread(homes, components), seconds)


def _spread(device_map: Mapping[str, str], components: tuple[Component, ...]) -> Devices:
    """Return the device of every unit: its own entry's, or that of the nearest module above it.

    Accelerate leaves out tensors that a module holds beside its children, if they are buffers; they
    lie where the map begins.
    """
    devices = {}
    for component in components:
        for path, _ in component.module.units():
            unit = at = join(component.name, path)
            while at and at not in device_map:
                at = at.rpartition(".")[0]
            devices[unit] = device_map.get(at, next(iter(device_map.values())))
    return devices
