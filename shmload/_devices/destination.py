"""Where a load's weights go, as the caller said it: checked before anything is decoded."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from shmload._checkpoints.source import Source
from shmload._decoding.allowance import Bound, bound_of
from shmload._placement.device_map import STRATEGIES, entries_of, parse_device
from shmload._placement.inventory import (
    OFFLOAD,
    Inventory,
    choose_inventory,
    is_on_the_host,
    parse_max_memory,
)
from shmload._runtimes.kinds import may_have_accelerators
from shmload._settings import parse_size, worker_count
from shmload.errors import ArgumentError


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """The devices of a load's weights, and what the copies there may use.

    Raises:
        ArgumentError: a value is not valid, or two of them exclude each other.
    """

    device_map: object
    """As `load_pipeline` takes it."""
    max_memory: Mapping[Any, object] | None = None
    """As `load_pipeline` takes it."""
    max_host_nbytes: int | None = None
    """How much memory of the host weights may take on their way, in bytes; None for no limit."""
    order: tuple[str, ...] = ()
    """Components in the order of their pipeline, by which strategies take them."""

    def __post_init__(self) -> None:
        if self.max_memory is not None:
            parse_max_memory(self.max_memory)
        if isinstance(self.device_map, str) and self.device_map in STRATEGIES:
            return
        is_all = not isinstance(self.device_map, Mapping)
        for _, value in entries_of(self.device_map):
            parse_device(value, is_all=is_all)

    @property
    def is_away(self) -> bool:
        """Whether the map by itself, without a strategy, sends every weight to an accelerator."""
        named = [parse_device(device) for device in self._named]
        return bool(named) and not any(map(is_on_the_host, named))

    def require_present(self) -> None:
        """Check that the machine has the accelerators that are named, before a decode.

        Only torch can tell for sure. If there may be one, and torch is not imported yet, nothing is
        checked: a load checks again once it has imported the libraries.

        Raises:
            ArgumentError: one is not there.
        """
        named = map(parse_device, self._named)
        limits = parse_max_memory(self.max_memory or {})
        if all(map(is_on_the_host, (*named, *limits))) or (
            "torch" not in sys.modules and may_have_accelerators()
        ):
            return
        here = choose_inventory(None, self.max_memory, needed=())
        for each in self._named:
            here.require(parse_device(each, here.current))

    def inventory(self) -> Inventory:
        """Return this machine's devices, as far as the map can use them; imports torch.

        A device that gets nothing is not asked for its memory: that may make a context there. The
        host has no limit but the caller's: the weights are there already.

        Raises:
            ArgumentError: `max_memory` names an accelerator that is not there.
        """
        named = self._named
        # A strategy may use any, and so may weights that wait.
        may_use_any = not named or any(parse_device(each) == OFFLOAD for each in named)
        return choose_inventory(None, self.max_memory, needed=None if may_use_any else named)

    @property
    def _named(self) -> list[object]:
        """The devices that the map names; none if it is a strategy."""
        if isinstance(self.device_map, str) and self.device_map in STRATEGIES:
            return []
        return [device for _, device in entries_of(self.device_map)]

    def bound(self, source: Source, workers: int | None = None) -> Bound | None:
        """Return the limit on the weights that the host holds at a time; None to hold all of them.

        It is None if the map leaves weights on the host, or if no limit was given and the weights
        are no larger than the limit would be.

        Args:
            source: what is loaded.
            workers: number of worker processes; None for the number in the settings.

        Raises:
            ArgumentError: memory of the host is limited, and some weights stay there.
        """
        if not self.is_away:
            if self.max_host_nbytes is not None:
                raise ArgumentError(
                    "max_host_memory is for weights that all go to accelerators, and this "
                    "device_map leaves some on the host; omit one of the two, or use "
                    "device_map='cuda'"
                )
            return None
        bound = bound_of(workers or worker_count(parent_is_busy=False), self.max_host_nbytes)
        is_worth_while = sum(os.stat(each).st_size for each in source.shards) > bound.ahead_nbytes
        return bound if is_worth_while or self.max_host_nbytes is not None else None

    @property
    def slots_nbytes(self) -> int | None:
        """How much of the caller's limit is for page-locked slots, in bytes; None for no limit."""
        return self.max_host_nbytes and self.max_host_nbytes // 2


def parse_max_host_memory(value: float | str | None) -> int | None:
    """Read a number of bytes, or a size such as `512MiB`.

    Raises:
        ArgumentError: it is neither.
    """
    return None if value is None else parse_size("max_host_memory", value)
