"""What clients are asked to do, and whether their answers keep the promises."""

import random
from collections.abc import Sequence
from typing import Any

from soaking.sources import TARGETS, Source, Version

Operation = dict[str, Any]
"""`do`: the name of a function in `client`; the other items are its arguments."""
Seen = Sequence[tuple[tuple[str, ...], Sequence[Version | None]]]
"""The names of each shard's tensors, and what it may have held; None while it was cut short."""

_OPERATIONS = ("load",) * 12 + ("warm", "check") * 3 + ("evict",) * 2
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


def choose(rng: random.Random, sources: Sequence[Source]) -> tuple[Operation, Source | None]:
    """Return a client's next operation, and the source that it loads."""
    do, source, dtype = rng.choice(_OPERATIONS), rng.choice(sources), rng.choice(TARGETS)
    keep, verify = rng.random() < 0.5 or source.must_keep(dtype), rng.random() < 0.2
    given = {"do": do, "path": str(source.path), "dtype": dtype}
    match do:
        case "load":
            return given | {"keep": keep, "verify": verify}, source
        case "warm":
            return given | {"verify": verify}, source
        case "evict":
            return {"do": do, "path": given["path"]}, None
    return {"do": do}, None


def wrong_with(
    operation: Operation, answer: dict[str, Any], held: dict[str, str], seen: Seen
) -> str:
    """Return what is wrong with an answer; empty if nothing is.

    Args:
        operation: what the client did.
        answer: of the client.
        held: what it had loaded before.
        seen: what the source's shards held meanwhile.
    """
    do = operation["do"]
    if "errors" in answer:
        return _wrong_error(do, set(answer["errors"]), seen)
    if do == "load":
        return _wrong_tensors(operation["dtype"], answer["tensors"], seen)
    if do == "warm" and not all(any(versions) for _, versions in seen):
        return "a shard was made resident that was never whole"
    if do == "check" and answer["tensors"] != held:
        return "what the client held has changed"
    if do == "leave" and answer["left"]:
        return f"the client has left open {answer['left']}"
    return ""


def _wrong_error(do: str, kinds: set[str], seen: Seen) -> str:
    if "ShmloadError" not in kinds:
        return "an error of another kind"
    if kinds & _NEVER:
        return "an error without a cause"
    if kinds & _OF_NAMES and do != "evict":
        return "an error about a segment, and the operation named none"
    has_changed = any(len(versions) > 1 or versions[0] is None for _, versions in seen)
    if "CheckpointError" in kinds and not has_changed:
        return "an error about a source that was intact all the time"
    return ""


def _wrong_tensors(dtype: str | None, tensors: dict[str, str], seen: Seen) -> str:
    names = {name for names, _ in seen for name in names}
    if names != set(tensors):
        return f"tensors are missing or too many: {sorted(names ^ set(tensors))}"
    for names, versions in seen:
        got = {name: tensors[name] for name in names}
        wanted = [version[dtype] for version in versions if version]
        if got not in wanted:
            return f"bytes that the file never had during the load: {got}\nit held {wanted}"
    return ""
