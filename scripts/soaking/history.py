"""Which version of a shard was current when, and so what a load may have read.

Times are of the monotonic clock, which all processes share. They are generous: a period begins
before the change that begins it, and ends after the change that ends it.
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
    """Digest of every tensor: requested dtype to tensor name to digest."""


@dataclass(slots=True)
class Period:
    """A span of time in which a shard did not change."""

    holds: Version | None
    """None while the file is too short: every load of it must fail."""
    begin_s: float
    end_s: float = math.inf


class History:
    """All periods of one shard, oldest first."""

    def __init__(self, version: Version) -> None:
        self._periods = [Period(version, time.monotonic())]

    @contextlib.contextmanager
    def turning(self, holds: Version | None) -> Iterator[None]:
        """Note that the block changes the shard to this version."""
        before = self._periods[-1]
        self._periods.append(Period(holds, time.monotonic()))
        try:
            yield
        finally:
            before.end_s = time.monotonic()

    def between(self, begin_s: float, end_s: float) -> list[Period]:
        """Return the periods that a load may have seen, oldest first."""
        return [p for p in self._periods if p.begin_s <= end_s and p.end_s >= begin_s]
