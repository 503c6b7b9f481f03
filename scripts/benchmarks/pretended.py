"""The host in the place of a GPU, to try what measures one on a machine without."""

from collections.abc import Iterable
from typing import Any

import torch

from shmload._runtimes.runtime import Runtime


class Pretended(Runtime):
    """A device that is the host: a copy is done when it has been started.

    Args:
        copies: whether it copies; else its memory is never written, and takes none.
    """

    def __init__(self, *, copies: bool) -> None:
        self.device, self.name = torch.device("cpu"), "no device"
        self._copies = copies

    def copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for target, source in copies:
            assert target.shape == source.shape
            if self._copies:
                target.copy_(source)

    def follow(self) -> None:
        pass

    join = drain = synchronize = follow

    def record(self) -> Any:
        return self

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        return True


def pretend() -> None:
    """Have all loads to a GPU in this process go to the host."""
    from shmload._building import placing
    from shmload._placement import inventory

    host = Pretended(copies=True)
    placing.runtime_of = lambda device: host  # type: ignore[attr-defined]
    inventory.machine_inventory = lambda *_: inventory.parse_inventory("80GiB,cpu=80GiB")
