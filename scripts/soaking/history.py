"""Which version of a shard was current when: what a load may have read.

Times are those of the monotonic clock, which all processes share. They err on the generous side: a
period begins before the change that begins it, and ends after the one that ends it.
"""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Version:
    """The content of a shard, as its tensors' digests."""

    number: int
    digests: dict[str | None, dict[str, str]]
    """Of every tensor by its name, by the dtype that was asked for."""


@dataclass(slots=True)
class Period:
    """A span of time in which a shard was the same."""

    holds: Version | None
    """None while the file is too short: nobody may load it."""
    begin_s: float
    end_s: float = math.inf


class History:
    """All periods of one shard, oldest first."""

    def __init__(self, version: Version) -> None:
        self._periods = [Period(version, time.monotonic())]

    @contextlib.contextmanager
    def turning(self, holds: Version | None) -> Iterator[None]:
        """Note that the block makes the shard something else."""
        before = self._periods[-1]
        self._periods.append(Period(holds, time.monotonic()))
        try:
            yield
        finally:
            before.end_s = time.monotonic()

    def between(self, begin_s: float, end_s: float) -> list[Period]:
        """Return the periods that a load may have seen, oldest first."""
        return [p for p in self._periods if p.begin_s <= end_s and p.end_s >= begin_s]
