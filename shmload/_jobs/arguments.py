"""What a job is told: its pipeline as a handle, its devices as names, its numbers checked."""

import os
from collections.abc import Collection, Sequence
from typing import Any

from shmload._placement.inventory import CPU, DISK, META, OFFLOAD, canonical_device
from shmload._runtimes import kinds
from shmload.errors import ArgumentError
from shmload.integrations.handles import Handle


def check_numbers(procs: int, threads: int, item_timeout_s: float | None) -> None:
    """Check the numbers that a job is told.

    Raises:
        ArgumentError: one of them is out of its range.
    """
    if item_timeout_s is not None and item_timeout_s <= 0:
        raise ArgumentError(f"item_timeout_s is {item_timeout_s}; give seconds, or None")
    if threads < 1:
        raise ArgumentError(f"threads is {threads}; it must be 1 or more")
    if procs < 0:
        raise ArgumentError(f"procs is {procs}; it must be 1 or more, or 0 for this process")


def check_items(items: object) -> None:
    """Raise ArgumentError if the items of a map are one text, whose letters nobody means."""
    if isinstance(items, str | bytes):
        raise ArgumentError(f"items is {items!r}; give the items themselves, such as a list")


def handle_of(
    source: str | os.PathLike[str] | Handle,
    components: Collection[str] | None,
    dtype: object,
    variant: str | None,
    hub_kwargs: dict[str, Any],
) -> Handle:
    """Return the handle of a job's pipeline; a given one is returned as it is.

    Raises:
        ArgumentError: a `Handle` came with arguments that it decides itself.
        SourceNotFound, UnknownComponent, UnknownDtype, CheckpointError: as `Handle.of`.
    """
    if not isinstance(source, Handle):
        return Handle.of(
            source,
            dtype=dtype,
            components=components,
            variant=variant,
            **hub_kwargs,
        )
    if components is not None or dtype is not None or variant is not None or hub_kwargs:
        raise ArgumentError(
            "the source is a Handle, which says what to load: give neither components, dtype, "
            "variant nor arguments for the hub"
        )
    return source


def devices_of(devices: str | Sequence[Any], procs: int) -> tuple[str, ...]:
    """Return the device of each process by name; of this process if `procs` is 0.

    Raises:
        ArgumentError: a device is not known, cannot compute, or has no driver here.
    """
    if devices == "round-robin":
        _require_driver(devices, kinds.may_have_accelerators())
        return ("round-robin",) * procs
    given = [devices] if isinstance(devices, str | int) else list(devices)
    if not given:
        raise ArgumentError("devices is an empty list; name one at least, such as 'cpu'")
    names = [canonical_device(device) for device in given]
    if unfit := {META, DISK, OFFLOAD}.intersection(names):
        raise ArgumentError(f"devices names {min(unfit)!r}, where nothing can be computed")
    for name in names:
        if procs and name != CPU:
            _require_driver(name, kinds.may_have(name.partition(":")[0]))
    return tuple(names[number % len(names)] for number in range(procs or 1))


def _require_driver(device: str, has_driver: bool) -> None:
    """Raise an error now, and not after the libraries are imported."""
    if not has_driver:
        raise ArgumentError(
            f"devices names {device!r}, but this machine has no driver of "
            f"{'an accelerator' if device == 'round-robin' else 'such a device'}; install it, or "
            "give devices='cpu'"
        )
