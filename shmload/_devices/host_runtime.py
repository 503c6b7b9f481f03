"""The host as a device: copies are done when they have been started, and nothing needs pinning."""

from collections.abc import Sequence

import torch

from shmload._devices.runtime import ALIGNMENT_NBYTES, Event


class HostRuntime:
    """The host as a device: see `Runtime`."""

    device = torch.device("cpu")
    name = "the host"
    driver = ""
    registers_read_only = True

    def reserve(self, sizes: Sequence[int]) -> None:
        pass

    def empty(self, nbytes: int) -> torch.Tensor:
        raw = torch.empty(nbytes + ALIGNMENT_NBYTES, dtype=torch.uint8)
        begin = -raw.data_ptr() % ALIGNMENT_NBYTES
        return raw[begin : begin + nbytes]

    def copy(self, target: torch.Tensor, source: torch.Tensor, lane: int) -> None:
        target.copy_(source)

    def follow(self, lane: int) -> None:
        pass

    def join(self, lane: int) -> None:
        pass

    def record(self, lane: int) -> Event:
        return _Done()

    def register(self, address: int, nbytes: int, *, read_only: bool) -> bool:
        return True

    def unregister(self, address: int) -> None:
        pass

    def pinned(self, nbytes: int) -> None:
        return None


class _Done:
    def wait(self) -> None:
        pass
