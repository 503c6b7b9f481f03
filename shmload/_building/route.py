"""How a pipeline's weights travel: decided once, before any weight byte is read."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shmload._building.keywords import BYPASSING_KEYWORDS, QUANTISING_KEYWORDS
from shmload._building.maker import Maker, is_left_to_library
from shmload._building.options import Options
from shmload._checkpoints.source import Source
from shmload._devices.destination import Destination, parse_max_host_memory
from shmload._placement.device_map import STRATEGIES
from shmload._placement.placement import place
from shmload._segments.segment import Stay
from shmload.errors import ArgumentError


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where weights go, and what the host holds of them."""

    destination: Destination | None
    """Devices that shmload copies weights to; None if they stay on the host, or if the library
    copies them."""
    is_bypassed: bool
    """The library reads other files, or makes new tensors: segments keep the stored dtypes."""
    may_stream: bool
    """The host may hold only a part of the weights at a time: nothing has to stay there."""


def choose_route(
    source: Source, maker: Maker, dtype: object, options: Options, kwargs: dict[str, Any]
) -> Route:
    """Decide how weights travel.

    Args:
        source: the pipeline or model, as its class takes it if memory of the host is limited: a
            strategy then decides by its components.
        maker: of it.
        dtype: as given to `load_pipeline`.
        options: how to load.
        kwargs: for `from_pretrained`. `device_map` and `max_memory` go in if the library copies the
            weights; `offload_folder` comes out if shmload does.

    Raises:
        ArgumentError: an argument is wrong, or does not go with another.
        DoesNotFit: as `place`.
    """
    destination = _parse_destination(source, options, kwargs)
    # With False the library reads its own files.
    is_bypassed = kwargs.get("use_safetensors") is False or any(map(kwargs.get, BYPASSING_KEYWORDS))
    keeps_nothing = options.stay is Stay.PRIVATE and not (options.verify or is_bypassed)
    if options.is_bounded:
        destination = _bound(destination if keeps_nothing else None, source, dtype)
    return Route(
        destination=destination,
        # The rule of a maker that keeps blocks knows what stays as it is.
        is_bypassed=is_bypassed and not maker.keeps_blocks,
        may_stream=keeps_nothing and destination is not None,
    )


def is_quantised(source: Source, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether the library quantises weights, or loads some that are quantised."""
    return any(map(kwargs.get, QUANTISING_KEYWORDS)) or any(
        checkpoint.config.get("quantization_config")
        for checkpoint in source.checkpoints
        if checkpoint.component not in kwargs
    )


def _parse_destination(
    source: Source, options: Options, kwargs: dict[str, Any]
) -> Destination | None:
    """Return where the weights go; None if they stay, or if the library copies them.

    Raises:
        ArgumentError: as `require_readable`.
    """
    if options.device_map is None:
        return None
    if is_quantised(source, kwargs):
        # Weights are quantised on the device that they go to, and only the library can move them.
        kwargs["device_map"] = options.device_map
        if options.max_memory is not None:
            kwargs["max_memory"] = options.max_memory
        return None
    kwargs.pop("offload_folder", None)  # nothing waits there
    return destination_of(options, source.components)


def destination_of(options: Options, order: tuple[str, ...] = ()) -> Destination:
    return Destination(
        device_map=options.device_map,
        max_memory=options.max_memory,
        max_host_nbytes=parse_max_host_memory(options.max_host_memory),
        order=order,
    )


def _bound(destination: Destination | None, source: Source, dtype: object) -> Destination:
    """Check that no weight has to stay on the host, and let a strategy decide now.

    Raises:
        ArgumentError: an argument keeps weights on the host.
        DoesNotFit: as `place`.
    """
    if destination is None:
        raise ArgumentError(
            "max_host_memory is for loads that keep nothing on the host: give a device_map, and "
            "neither keep, share, verify, quantised weights nor other files than safetensors"
        )
    if destination.device_map not in STRATEGIES:
        return destination
    from shmload._building.module_trees import components_of

    # For a model of transformers `auto` is the dtype that sizes are computed with anyway.
    known = dtype if source.is_pipeline or not is_left_to_library(dtype) else None
    placement = place(components_of(source, known), destination.device_map, destination.inventory())
    # The default is for models without a checkpoint, such as models that the caller passes.
    first = next(iter(placement.execution_devices.values()))
    decided = {"": first} | placement.device_map
    return msgspec.structs.replace(destination, device_map=decided)
