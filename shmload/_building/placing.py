"""Puts models on the devices of a placement, with hooks that move activations between them."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shmload._building.classes import components_by_name
from shmload._building.maker import Maker
from shmload._building.mapped import is_in, plain_tensors
from shmload._building.module_trees import component_of, components_of
from shmload._checkpoints.source import Source
from shmload._devices.destination import Destination, parse_max_host_memory
from shmload._devices.hooks import (
    WaitingBlocks,
    attach_hooks,
    device_at,
    find_blocks,
    note_devices,
    stay_on_device,
)
from shmload._devices.moves import Moves
from shmload._devices.origin import SegmentFiles
from shmload._devices.upload import bring
from shmload._devices.waiting import Waiting
from shmload._host.collector import paused_gc
from shmload._host.descriptors import Inode
from shmload._host.procfs import mappings_of
from shmload._loading.load import Load
from shmload._loading.trace import Phase, during
from shmload._placement.device_map import STRATEGIES
from shmload._placement.inventory import CPU, META, OFFLOAD
from shmload._placement.modules import Component
from shmload._placement.placement import Placement, place
from shmload._runtimes.kinds import runtime_of
from shmload._runtimes.runtime import Runtime

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

_STAYS = (CPU, OFFLOAD, META)


def to_device(
    module: nn.Module,
    device_map: object,
    *,
    max_memory: Mapping[Any, object] | None = None,
    max_host_memory: float | str | None = None,
) -> nn.Module:
    """Move any module to one device or to several, by bulk copies; blocks until it is there.

    Args:
        module: on the CPU; changed in place. Parameters stay the same objects. Torch moves tensors
            with a class of their own, such as quantised ones.
        device_map: as for `load_pipeline`, by the paths of the modules in it.
        max_memory: as for `load_pipeline`.
        max_host_memory: the most page-locked memory that bytes pass through, in bytes or as
            `512MiB`.

    Returns:
        The module.

    Raises:
        ShmloadError: the map does not fit the module, or a device is too small for the map.
        torch.OutOfMemoryError: a device is full; the module is then as it was.
    """
    destination = Destination(
        device_map=device_map,
        max_memory=max_memory,
        max_host_nbytes=parse_max_host_memory(max_host_memory),
    )
    with paused_gc():
        place_models({"": module}, destination)
    return module


def require_fit(
    source: Source,
    maker: Maker,
    dtype: object,
    kwargs: Mapping[str, object],
    destination: Destination,
) -> None:
    """Check a device map by the classes of what is loaded, before it is built.

    If a class is of neither library, or only the library reads its files, its modules are known
    when it is built, and checked then.

    Args:
        source: as its classes take it.
        maker: of the pipeline or model.
        dtype: as given to `load_pipeline`.
        kwargs: for `from_pretrained`; models among them are placed too.
        destination: to check.

    Raises:
        ShmloadError: as for `place_pipeline`.
    """
    destination.require_present()
    device_map = destination.device_map
    is_one_device = not isinstance(device_map, Mapping) and device_map not in STRATEGIES
    # One file may hold a whole pipeline: only its class knows which components.
    is_opaque = maker.is_of_pipelines and not source.is_pipeline
    if is_opaque or (is_one_device and destination.max_memory is None):
        return
    described = components_of(source, dtype)
    if not any(each.module.is_unit for each in described):
        passed = [component_of(name, model) for name, model in _models_in(kwargs).items()]
        _decide([*described, *passed], destination)


def place_pipeline(
    pipe: "DiffusionPipeline",
    destination: Destination,
    load: Load | None = None,
) -> None:
    """Put a pipeline's models on their devices.

    Args:
        pipe: on the CPU; changed in place.
        destination: the device map is by component.
        load: the load that it was built from.

    Raises:
        ShmloadError: the map does not fit the pipeline, a device is too small, or the load failed.
    """
    placement = place_models(_models_in(components_by_name(pipe)), destination, load)
    pipe.hf_device_map = _map_for_libraries(placement)


def _models_in(parts: Mapping[str, object]) -> dict[str, nn.Module]:
    return {name: each for name, each in parts.items() if isinstance(each, nn.Module)}


def _decide(components: Iterable[Component], destination: Destination) -> Placement:
    """Decide where components go, in the order of their pipeline."""
    order = {name: place for place, name in enumerate(destination.order)}
    ordered = sorted(components, key=lambda each: order.get(each.name, len(order)))
    placement = place(ordered, destination.device_map, destination.inventory())
    return placement


def _map_for_libraries(placement: Placement) -> dict[str, str]:
    """Return a placement as diffusers keeps it.

    With one entry diffusers allows `to` and offloading. With several it refuses them, and names
    `reset_device_map`, which brings all weights to the host.
    """
    flat = _flat(placement)
    used = set(flat.values())
    return {"": used.pop()} if len(used) == 1 else flat


def place_models(
    models: Mapping[str, nn.Module],
    destination: Destination,
    load: Load | None = None,
) -> Placement:
    """Put some models on their devices; blocks until they are there.

    Args:
        models: by component, or a single one by the empty name; changed in place.
        destination: the device map, limits and way to copy.
        load: as for `place_pipeline`.

    Raises:
        ShmloadError: as for `place_pipeline`.
    """
    components = {name: component_of(name, model) for name, model in models.items()}
    placement = _decide(components.values(), destination)
    devices = {name: _by_path(where) for name, where in placement.components.items()}
    computing = placement.execution_devices
    roots: dict[str, dict[nn.Module, nn.Module]] = {}
    targets = dict(devices)
    for name, where in devices.items():
        if OFFLOAD in where.values() and computing[name] != CPU:
            paths = [path for path, _ in components[name].module.units()]
            roots[name] = find_blocks(models[name], where, paths)
            staying = stay_on_device(models[name], where, roots[name])
            targets[name] = where | dict.fromkeys(staying, computing[name])
    runtime_at = functools.cache(lambda name: runtime_of(torch.device(name)))
    _copy(models, targets, destination, runtime_at, load)
    used = {device for where in devices.values() for device in where.values()}
    waiting_at = functools.cache(lambda name: Waiting(runtime_at(name)))
    segments = SegmentFiles(_files_to_pin(load) if OFFLOAD in used else ())
    for name, model in models.items():
        _empty(model, devices[name])
        if len(used) == 1 and OFFLOAD not in used:
            note_devices(model, devices[name])
            continue
        blocks = None
        if name in roots:
            blocks = WaitingBlocks(waiting_at(computing[name]), roots[name], segments)
        attach_hooks(model, devices[name], computing[name], blocks)
    return placement


def _files_to_pin(load: Load | None) -> list[tuple[Inode, int]]:
    """Return the segments whose pages may stay pinned, each with a descriptor, the load's."""
    if load is None:
        return []
    return [(segment.inode, segment.fd) for segment in load.holdings.segments()]


def _copy(
    models: Mapping[str, nn.Module],
    devices: Mapping[str, Mapping[str, str]],
    destination: Destination,
    runtime_at: Callable[[str], Runtime],
    load: Load | None,
) -> None:
    """Copy to accelerators the tensors that belong there; blocks until they are there."""
    names = {device for where in devices.values() for device in where.values()}.difference(_STAYS)
    runtimes = {name: runtime_at(name) for name in sorted(names)}
    if not runtimes:
        if load:
            load.wait()
        return
    moves = Moves(
        [
            (model, functools.partial(_runtime_at, runtimes, devices[name]))
            for name, model in models.items()
        ]
    )
    if load and load.is_bounded:
        parts = mappings_of({part.inode for _, part in load.holdings.unfinished()})
        others = itertools.chain.from_iterable(map(plain_tensors, moves.others))
        if any(is_in(parts, tensor) for tensor in others):
            load.keep_all("some of its weights stay on the host, or are moved by torch")
    limit = destination.slots_nbytes if load else destination.max_host_nbytes
    with during(Phase.COPY, ", ".join(runtimes)):
        bring(moves, load, limit, load.holdings.descriptors() if load else ())
        moves.commit()


def _runtime_at(
    runtimes: Mapping[str, Runtime], devices: Mapping[str, str], path: str
) -> Runtime | None:
    return runtimes.get(device_at(devices, path, CPU))


def _empty(model: nn.Module, devices: Mapping[str, str]) -> None:
    """Replace tensors whose device is `meta` by ones without memory."""
    if META not in devices.values():
        return
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                tensor_path = f"{path}.{name}" if path else name
                if tensor is None or device_at(devices, tensor_path, CPU) != META:
                    continue
                empty = tensor.detach().to(META)
                if isinstance(tensor, nn.Parameter):
                    empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                tensors[name] = empty


def _by_path(where: str | Mapping[str, str]) -> dict[str, str]:
    return {"": where} if isinstance(where, str) else dict(where)


def _flat(placement: Placement) -> dict[str, str]:
    """Return device by component, or by the path of a component's module."""
    return {
        f"{name}.{path}" if path else name: device
        for name, where in placement.components.items()
        for path, device in _by_path(where).items()
    }
