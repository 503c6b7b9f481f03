"""How a pipeline's weights travel: decided once, before any weight byte is read."""

from collections.abc import Mapping
from typing import Any

import msgspec

from shmload._checkpoints.resolve import Source
from shmload._decoding.ring import Ring
from shmload._placement.device_map import STRATEGIES
from shmload._placement.inventory import choose_inventory
from shmload._placement.placement import place
from shmload._segments.segment import Stay
from shmload._settings import local_world_size
from shmload.errors import ArgumentError
from shmload.integrations._devices.destination import Destination, parse_max_host_memory
from shmload.integrations._devices.ways import Pin

# With these the library reads other files, or makes new tensors of what it reads.
_BYPASSING_KWARGS = (
    "use_flashpack",
    "use_onnx",
    "quantization_config",
    "gguf_file",
    "state_dict",
    "key_mapping",
)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """Where weights go, by segments or by a ring, and how long segments stay."""

    destination: Destination | None
    """Devices that shmload copies weights to; None if they stay on the host, or if the library
    copies them."""
    stay: Stay
    """How long segments stay."""
    tries_to_share: bool
    """Share segments if there is room: one of several ranks loads, and was not told otherwise."""
    is_bypassed: bool
    """The library reads other files, or makes new tensors: segments keep the stored dtypes."""
    may_stream: bool
    """Weights may pass through a ring: they go to devices and nothing has to stay on the host."""

    def open_ring(self, source: Source) -> Ring | None:
        """Return a ring for the weights to pass through, the caller's; None if they need none.

        Raises:
            ArgumentError: memory of the host is limited, and some weights are to stay there.
        """
        return self.destination.open_ring(source) if self.destination and self.may_stream else None


def choose_route(
    source: Source,
    dtype: object,
    destination: Destination | None,
    kwargs: Mapping[str, Any],
    *,
    keep: bool,
    share: bool | None,
    verify: bool,
    is_bounded: bool,
) -> Route:
    """Decide how a pipeline's weights travel.

    Args:
        source: the pipeline.
        dtype: as given to `load_pipeline`.
        destination: from `parse_destination`.
        kwargs: for `from_pretrained`.
        keep: as given to `load_pipeline`.
        share: as given to `load_pipeline`.
        verify: as given to `load_pipeline`.
        is_bounded: memory of the host is limited.

    Raises:
        ArgumentError: it is limited, and some argument keeps weights there.
        DoesNotFit: as `place`.
        UnknownComponent: the device map names a component that the pipeline lacks.
    """
    is_bypassed = kwargs.get("use_safetensors") is False or any(map(kwargs.get, _BYPASSING_KWARGS))
    stay = Stay.RESIDENT if keep else Stay.SHARED if share else Stay.PRIVATE
    keeps_nothing = stay is Stay.PRIVATE and not (verify or is_bypassed)
    if is_bounded:
        destination = _bound(destination if keeps_nothing else None, source, dtype)
    if destination:
        destination.require_known(source, kwargs)
    return Route(
        destination=destination,
        stay=stay,
        tries_to_share=share is None and not (keep or is_bounded) and local_world_size() > 1,
        is_bypassed=is_bypassed,
        may_stream=keeps_nothing and destination is not None,
    )


def parse_destination(
    device_map: object,
    max_memory: Mapping[Any, object] | None,
    max_host_memory: float | str | None,
    pin: Pin,
    kwargs: dict[str, Any],
) -> Destination | None:
    """Return where the weights go; None if they stay, or if the library copies them.

    Args:
        device_map: as given to `load_pipeline`.
        max_memory: as given to `load_pipeline`.
        max_host_memory: as given to `load_pipeline`.
        pin: as given to `load_pipeline`.
        kwargs: for `from_pretrained`. `device_map` and `max_memory` go in if the library copies the
            weights; `offload_folder` comes out if shmload does.

    Raises:
        ArgumentError: an argument is wrong, or does not go with another.
    """
    if device_map is None:
        if max_memory is not None:
            raise ArgumentError("max_memory is for a device_map, such as 'auto'; give both")
        return None
    if kwargs.get("quantization_config") is not None:
        kwargs["device_map"] = device_map  # weights are quantised on the device that they go to
        if max_memory is not None:
            kwargs["max_memory"] = max_memory
        return None
    return Destination(
        device_map=device_map,
        max_memory=max_memory,
        max_host_nbytes=parse_max_host_memory(max_host_memory),
        pin=pin,
        offload_folder=kwargs.pop("offload_folder", None),
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
            "neither keep, share, verify, quantization_config nor other files than safetensors"
        )
    if destination.device_map not in STRATEGIES:
        return destination
    from shmload.integrations._building.module_trees import components_of

    inventory = choose_inventory(None, destination.max_memory)
    placement = place(components_of(source, dtype), destination.device_map, inventory)
    # The default is for models without a checkpoint, such as models that the caller passes.
    first = next(iter(placement.execution_devices.values()))
    decided = {"": first} | placement.device_map
    return msgspec.structs.replace(destination, device_map=decided)
