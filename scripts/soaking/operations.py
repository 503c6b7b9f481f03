"""The clients' operations, chosen at random."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from soaking.sources import TARGETS, Source

_OPERATIONS = ("load",) * 9 + ("view", "warm", "check") * 3 + ("evict", "verify", "collect")


@dataclass(slots=True)
class Asked:
    """A client's operation, and the source that it works on."""

    operation: dict[str, Any]
    """`do`: the name of a function in `client`; the other items are its arguments."""
    source: Source | None = None
    begin_s: float = 0.0
    end_s: float = 0.0


def choose(rng: random.Random, sources: Sequence[Source]) -> Asked:
    """Return a client's next operation."""
    do, source, dtype = rng.choice(_OPERATIONS), rng.choice(sources), rng.choice(TARGETS)
    keep, verify = rng.random() < 0.5, rng.random() < 0.2
    given: dict[str, Any] = {"do": do, "path": str(source.path), "dtype": dtype}
    keep = keep or source.must_keep(dtype)
    match do:
        case "load":
            return Asked(given | {"keep": keep, "verify": verify}, source)
        case "view":
            return Asked(given | {"keep": keep}, source)
        case "warm":
            return Asked(given | {"verify": verify}, source)
        case "evict":
            return Asked({"do": do, "path": given["path"]})
        case _:
            return Asked({"do": do})


def load_checked(source: Source) -> Asked:
    """Return a load with a conversion whose result is checked."""
    given = {"path": str(source.path), "dtype": "bfloat16", "keep": False, "verify": True}
    return Asked({"do": "load", **given}, source)


def leave() -> Asked:
    """Return the operation that drops everything and reports what is left."""
    return Asked({"do": "leftovers"})
