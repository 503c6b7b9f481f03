"""Decides whether a client's answer is right."""

from dataclasses import dataclass, field
from typing import Any

from soaking.operations import Asked

# Errors that no fault of a soak can cause.
_NEVER = {
    "ArgumentError",
    "PeerRefused",
    "ProtocolError",
    "SegmentCorrupt",
    "SegmentUntrusted",
    "ServiceRunning",
    "ServiceUnavailable",  # loads fall back to their own workers
    "SocketUnusable",
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
        if do == "warm" and not _could_succeed(asked):
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
    if "CheckpointError" in kinds and not (asked.source and _has_changed(asked)):
        return "an error about a source that was intact all the time"
    return ""


def _has_changed(asked: Asked) -> bool:
    assert asked.source
    seen = [shard.history.between(asked.begin_s, asked.end_s) for shard in asked.source.shards]
    return any(len(periods) > 1 or periods[0].holds is None for periods in seen)


def _could_succeed(asked: Asked) -> bool:
    assert asked.source
    seen = [shard.history.between(asked.begin_s, asked.end_s) for shard in asked.source.shards]
    return all(any(period.holds for period in periods) for periods in seen)


def _wrong_tensors(asked: Asked, tensors: dict[str, str]) -> str:
    assert asked.source
    names = {name for shard in asked.source.shards for name in shard.names}
    if names != set(tensors):
        return f"tensors are missing or too many: {sorted(names ^ set(tensors))}"
    for shard in asked.source.shards:
        got = {name: tensors[name] for name in shard.names}
        seen = [period.holds for period in shard.history.between(asked.begin_s, asked.end_s)]
        target = asked.operation["dtype"]
        wanted = {version.number: version.digests[target] for version in seen if version}
        if got not in wanted.values():
            return (
                f"{shard.path}: the load gave bytes that the file never had during it\n"
                f"got: {got}\nit held: {wanted or 'no whole version'}"
            )
    return ""
