"""Which way to feed a device is the quickest: loads measure it, and it is remembered for a month.

No copy is made to find out. On a machine that knows nothing yet the first large load takes the
first way and the next one the second; each notes its rate. What a process's first copy costs and
what later ones cost is remembered apart: the first one pays for what happens once.
"""

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from shmload._devices.runtime import Runtime
from shmload._devices.way import Way
from shmload._devices.ways import DEFAULT, WAYS, Pin, measured_ways
from shmload._host.memo import Memo
from shmload._wording import logger_of

logger = logger_of(__name__)

# Larger than the caches of a processor, and than what it costs to begin a copy matters for.
_MIN_NBYTES = 512 << 20
_EXPIRES_S = 30 * 24 * 3600.0

_noted: set[str] = set()
"""Of the devices that this process has copied to, by the keys of their rates."""


class _Rate(msgspec.Struct, frozen=True):
    """How quick a copy was."""

    bytes_per_s: float
    at: float
    """When, in seconds since 1970."""


class _Rates(msgspec.Struct, frozen=True):
    """What is remembered of a device: rates by the name of a way."""

    first: dict[str, _Rate] = {}
    """Of the first copy of a process."""
    later: dict[str, _Rate] = {}
    """Of its later ones."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A way that was chosen for one copy."""

    way: Way
    note: Callable[[float, int], None]
    """To be called with the seconds that the copy took, and how many bytes had to take the ring."""


def choose_way(pin: Pin, runtime: Runtime, nbytes: int) -> Choice:
    """Return the way to feed a device.

    Args:
        pin: a way's name; or `auto` for the quickest, as far as loads on this machine have found.
        runtime: of the device.
        nbytes: how much will be copied by it, in bytes; 0 for a copy that shall not be measured.
    """
    if pin != "auto":
        return Choice(WAYS[pin](), _forget)
    memo = _memo(runtime)
    is_first = memo.key not in _noted
    rates = _recall(memo, is_first=is_first)
    is_measured = nbytes >= _MIN_NBYTES
    way = _untried(rates, runtime) if is_measured else None
    if way is None:
        way = WAYS[max(rates, key=lambda name: rates[name].bytes_per_s, default=DEFAULT)]()

    def note(elapsed_s: float, other_nbytes: int) -> None:
        _noted.add(memo.key)
        if is_measured:
            # Small tensors always take the ring; if most bytes did, it is the ring's rate.
            name = way.name if other_nbytes <= nbytes // 2 else DEFAULT
            rate = _Rate(nbytes / elapsed_s, time.time())
            logger.info("%s: %s, %.1f GB/s", runtime.name, name, rate.bytes_per_s / 1e9)
            _remember(memo, name, rate, is_first=is_first)

    return Choice(way, note)


def _forget(elapsed_s: float, other_nbytes: int) -> None:
    """Note nothing: the way was asked for."""


def _untried(rates: dict[str, _Rate], runtime: Runtime) -> Way | None:
    """Return the first way that was not measured yet and is possible; None if there is none."""
    for way in measured_ways():
        if way.name not in rates:
            reason = way.why_not(runtime)
            if reason is None:
                return way
            logger.info("%s is not fed by %s: %s", runtime.name, way.name, reason)
    return None


def _memo(runtime: Runtime) -> Memo[_Rates]:
    facts = (runtime.name, runtime.driver, platform.release(), torch.__version__)
    return Memo("pins", _Rates, facts)


def _recall(memo: Memo[_Rates], *, is_first: bool) -> dict[str, _Rate]:
    """Return the rates that are not too old, of ways that there are."""
    known = memo.read() or _Rates()
    now = time.time()
    return {
        name: rate
        for name, rate in (known.first if is_first else known.later).items()
        if name in WAYS and 0 <= now - rate.at < _EXPIRES_S
    }


def _remember(memo: Memo[_Rates], name: str, rate: _Rate, *, is_first: bool) -> None:
    known = memo.read() or _Rates()
    (known.first if is_first else known.later)[name] = rate
    memo.write(known)
