"""Which version of a shard was current when, and so what a load may have read.

Times are of the monotonic clock, which all processes share. They are generous: a period begins
before the change that begins it, and ends after the change that ends it.
"""

import contextlib
import hashlib
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Version:
    """The content of a shard, as its tensors' digests."""

    number: int
    digests: dict[str | None, dict[str, str]]
    """Digest of every tensor: requested dtype to tensor name to digest."""


@dataclass(slots=True)
class _Period:
    """A span of time in which a shard did not change."""

    holds: Version | None
    """None while the file is too short: every load of it must fail."""
    begin_s: float
    end_s: float = math.inf


class History:
    """All periods of one shard, oldest first."""

    def __init__(self, version: Version) -> None:
        self._periods = [_Period(version, time.monotonic())]

    @contextlib.contextmanager
    def turning(self, holds: Version | None) -> Iterator[None]:
        """Note that the block changes the shard to this version."""
        before = self._periods[-1]
        self._periods.append(_Period(holds, time.monotonic()))
        try:
            yield
        finally:
            before.end_s = time.monotonic()

    def between(self, begin_s: float, end_s: float) -> list[Version | None]:
        """Return what a load may have read, oldest first."""
        return [p.holds for p in self._periods if p.begin_s <= end_s and p.end_s >= begin_s]


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return, for every tensor, one text with dtype, shape and digest of its bytes."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest}"
