"""The clients' operations: chosen at random, and their answers judged."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from soaking.sources import TARGETS, Shard, Source, Version

_OPERATIONS = ("load",) * 9 + ("view", "warm", "check") * 3 + ("evict", "verify", "collect")


@dataclass(slots=True)
class Asked:
    """A client's operation, and the source that it works on."""

    operation: dict[str, Any]
    """`do`: the name of a function in `client`; the other items are its arguments."""
    source: Source | None = None
    begin_s: float = 0.0
    end_s: float = 0.0

    @property
    def seen(self) -> list[tuple[Shard, list[Version | None]]]:
        """What each shard may have held meanwhile, oldest first; None while it was cut short."""
        shards = self.source.shards if self.source else ()
        return [(shard, shard.history.between(self.begin_s, self.end_s)) for shard in shards]


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


# Answers ------------------------------------------------------------------------------------------

# Errors that no fault of a soak can cause.
_NEVER = {
    "ArgumentError",
    "ProtocolError",
    "SegmentCorrupt",
    "SegmentUntrusted",
    "ServiceError",
    "SourceNotFound",
}
# Errors that are allowed only for operations on a named segment.
_OF_NAMES = {"SegmentBusy", "SegmentNotFound"}


@dataclass(slots=True)
class Judge:
    """Judges answers, and remembers in `held` what each client has loaded."""

    held: dict[str, dict[str, str]] = field(default_factory=dict)
    """Digests of the tensors that each client holds: client name to tensor name to digest."""

    def outcome(self, client: str, asked: Asked, answer: dict[str, Any]) -> tuple[str, str]:
        """Return the outcome's name, and what is wrong with it ("" if nothing)."""
        do = asked.operation["do"]
        if do in ("load", "view", "leftovers"):
            self.held.pop(client, None)
        if "errors" in answer:
            return answer["errors"][0], _wrong_error(asked, answer)
        if do in ("load", "view"):
            self.held[client] = answer["tensors"]
            return "ok", _wrong_tensors(asked, answer["tensors"])
        if do == "warm" and not all(any(held) for _, held in asked.seen):
            return "ok", "a shard was made resident that was never whole"
        if do == "check" and answer["tensors"] != self.held.get(client, {}):
            return "ok", "what the client held has changed"
        if do == "leftovers" and answer["left"]:
            return "ok", f"the client has left open {answer['left']}"
        return "ok", ""


def _wrong_error(asked: Asked, answer: dict[str, Any]) -> str:
    kinds = set(answer["errors"])
    if "ShmloadError" not in kinds:
        return "an error of another kind"
    if kinds & _NEVER:
        return "an error without a cause"
    if kinds & _OF_NAMES and asked.operation["do"] != "evict":
        return "an error about a segment, and the operation named none"
    has_changed = any(len(held) > 1 or held[0] is None for _, held in asked.seen)
    if "CheckpointError" in kinds and not has_changed:
        return "an error about a source that was intact all the time"
    return ""


def _wrong_tensors(asked: Asked, tensors: dict[str, str]) -> str:
    names = {name for shard, _ in asked.seen for name in shard.names}
    if names != set(tensors):
        return f"tensors are missing or too many: {sorted(names ^ set(tensors))}"
    for shard, held in asked.seen:
        got = {name: tensors[name] for name in shard.names}
        target = asked.operation["dtype"]
        wanted = {version.number: version.digests[target] for version in held if version}
        if got not in wanted.values():
            return (
                f"{shard.path}: the load gave bytes that the file never had during it\n"
                f"got: {got}\nit held: {wanted or 'no whole version'}"
            )
    return ""
