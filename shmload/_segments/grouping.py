"""Groups segments into models: functions of their arguments alone.

A segment belongs to the source that it was decoded from. A variant of the source is another model;
so is each dtype, where a shard is resident in several, and each earlier version of changed files. A
segment belongs to several models where these have the same file, or where it is the only one of its
shard and no model in its own dtype is whole with it.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence

import msgspec

from shmload._checkpoints.rule import RAW
from shmload._segments.listing import SegmentInfo
from shmload._segments.roots import Root, tell_apart
from shmload._segments.users import User

_ID_NBYTES = 4


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The resident segments of one source in one dtype."""

    name: str
    """The hub id, the URL, or as many last folders of the source as tell it apart; a file's own
    name. A variant follows behind a colon."""
    id: str
    """Eight hexadecimal digits, the same as long as its source and dtype are."""
    dtype: str
    """torch's name of the dtype of its weights; several with commas, the largest share first."""
    components: tuple[str, ...]
    """Its resident components, the largest first; empty for a model without components."""
    absent: tuple[str, ...] = ()
    """Its other components with weights on disk: evicted, or never decoded in this dtype."""
    nbytes: int
    """Size of its segments in bytes, with those that it shares."""
    source: str
    """Path of the directory or file that it is loaded from."""
    segments: tuple[SegmentInfo, ...]
    shared_with: tuple[str, ...]
    """The other models that have some of the same segments."""
    used_by: tuple[User, ...]
    """The processes that are attached or map it, as far as this one can see them."""
    is_leased: bool
    """Whether some process is attached or maps it, seen or not."""
    created_at: float
    """When its first segment was decoded, in seconds since the epoch."""
    used_at: float
    """When it was last decoded, attached, given back or unpinned, in seconds since the epoch."""
    is_pinned: bool
    """Whether none of its segments is evicted to make room."""
    pinned_segments: int
    """How many of its segments are never evicted."""
    keep_for_s: int
    """How long it stays while no process uses it, in seconds; 0 if nothing limits that."""
    is_current: bool
    """Whether the files on disk are still those that were decoded."""
    variant: str = ""
    """The variant of its files, such as `fp16`; empty for plain files."""

    @property
    def full_name(self) -> str:
        """Its name and dtype, for messages."""
        return f"{self.name} ({self.dtype})" if self.dtype else self.name


class _Draft(msgspec.Struct, frozen=True):
    """Which segments make a model."""

    home: Root
    dtype: str
    """Empty if the source is resident in one dtype only."""
    segments: tuple[SegmentInfo, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(info.name for info in self.segments)


def group_segments(
    found: Sequence[SegmentInfo],
    roots: Mapping[str, Root],
    shards: Mapping[str, Mapping[str, str]],
    users: Mapping[str, tuple[User, ...]],
) -> list[Model]:
    """Group segments into models, in the order of their first segments.

    Args:
        found: the segments.
        roots: where each shard's model lies, by the shard's path.
        shards: the component of each file that a model has now, by the model's key and then by the
            file's `Identity.key`. A model that is not named has the files it was decoded from.
        users: the processes that are attached to segments or map them, by segment.
    """
    groups: dict[tuple[str, int], list[SegmentInfo]] = {}
    homes: dict[str, Root] = {}
    ages = _ages(found)
    for info in found:
        home = roots.get(info.source) or Root(path=info.source or info.name)
        homes[home.key] = home
        groups.setdefault((home.key, ages.get(info.name, 0)), []).append(info)
    drafts = []
    for (key, age), own in groups.items():
        others = {} if age else shards.get(key, {})
        mine = {info.name for info in own}
        also = [info for info in found if info.identity in others and info.name not in mine]
        drafts += _divide(homes[key], own, also)
    drafts = [draft for draft in drafts if not any(draft.names < each.names for each in drafts)]
    names = tell_apart({draft.home.key: draft.home for draft in drafts}.values())
    made = [_make(draft, names[draft.home.key], shards, users) for draft in drafts]
    return [msgspec.structs.replace(each, shared_with=_sharing(each, made)) for each in made]


def _ages(found: Sequence[SegmentInfo]) -> dict[str, int]:
    """Return which version of its file each segment is of, where the file has changed since.

    Returns:
        By segment: 1 for the latest version that is resident, 2 for the one before, and so on.
        Nothing for a file that is as it was decoded.
    """
    versions: dict[str, list[str]] = {}
    for info in sorted(found, key=lambda info: info.created_at, reverse=True):
        known = versions.setdefault(info.source, [])
        if not info.is_current and info.identity not in known:
            known.append(info.identity)
    return {
        info.name: versions[info.source].index(info.identity) + 1
        for info in found
        if not info.is_current
    }


def _divide(home: Root, own: Sequence[SegmentInfo], also: Sequence[SegmentInfo]) -> list[_Draft]:
    """Divide the segments of one source by dtype, if some shard is there in several.

    Args:
        home: the source.
        own: the segments that were decoded from it.
        also: the segments of files that it shares with other sources.
    """
    dtypes: dict[str, set[str]] = {}
    for info in own:
        dtypes.setdefault(info.identity or info.name, set()).add(info.dtype)
    divided = [d for several in dtypes.values() if len(several) > 1 for d in sorted(several)]
    whole = {d for d in divided if all(d in each or len(each) == 1 for each in dtypes.values())}
    of = {dtype: [info for info in own if info.dtype == dtype] for dtype in divided}

    def is_shared(info: SegmentInfo, dtype: str) -> bool:
        """Tell whether a segment that is there in one dtype is also of the model in this one.

        Not if the model in its own dtype is whole with it, and the process that decoded it has
        decoded nothing in this dtype: then this model's own segment was evicted, or never decoded.
        Nor if it was cast, and another shard of its component was cast to this dtype: a load casts
        all shards of a component to one.
        """
        if len(dtypes[info.identity or info.name]) > 1:
            return False
        if info.dtype not in whole:
            return True
        folder = os.path.dirname(info.source)
        if info.conversion != RAW.text and any(
            os.path.dirname(each.source) == folder for each in of[dtype]
        ):
            return False
        return any(each.creator == info.creator for each in of[dtype])

    drafts = []
    for dtype in dict.fromkeys(divided) or [""]:
        held = [info for info in own if not dtype or info.dtype == dtype or is_shared(info, dtype)]
        wanted = {info.dtype for info in held}
        held += (info for info in also if info.dtype in wanted)
        drafts.append(_Draft(home, dtype, tuple(held)))
    return drafts


def _make(
    draft: _Draft,
    name: str,
    shards: Mapping[str, Mapping[str, str]],
    users: Mapping[str, tuple[User, ...]],
) -> Model:
    home, held = draft.home, draft.segments
    components: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    inside = shards.get(home.key, {})
    for info in held:
        component = home.component_of(info.source) or inside.get(info.identity, "")
        if info.kept:  # of the whole pipeline
            component = ""
        components[component] = components.get(component, 0) + info.nbytes
        dtypes[info.dtype] = dtypes.get(info.dtype, 0) + info.nbytes
    by_pid = {user.pid: user for info in held for user in users.get(info.name, ())}
    dtype = ", ".join(each for each in _largest_first(dtypes) if each)
    on_disk = set(inside.values()) if held[0].is_current else set()
    key = f"{home.key}\0{draft.dtype or dtype}\0{held[0].is_current}"
    if not held[0].is_current:  # of several versions of a file
        key += f"\0{held[0].identity}"
    return Model(
        name=name,
        id=hashlib.blake2b(key.encode(), digest_size=_ID_NBYTES).hexdigest(),
        dtype=dtype,
        components=tuple(each for each in _largest_first(components) if each),
        absent=tuple(sorted(on_disk - components.keys() - {""})) if any(components) else (),
        nbytes=sum(info.nbytes for info in held),
        source=home.path,
        segments=held,
        shared_with=(),
        used_by=tuple(by_pid[pid] for pid in sorted(by_pid)),
        is_leased=any(info.is_leased for info in held),
        created_at=min(info.created_at for info in held),
        used_at=max(info.used_at for info in held),
        is_pinned=all(info.is_pinned for info in held),
        pinned_segments=sum(info.is_pinned for info in held),
        keep_for_s=min((info.keep_for_s for info in held if info.keep_for_s), default=0),
        is_current=held[0].is_current,
        variant=home.variant,
    )


def _largest_first(nbytes: Mapping[str, int]) -> list[str]:
    return sorted(nbytes, key=lambda name: (-nbytes[name], name))


def _sharing(model: Model, models: Sequence[Model]) -> tuple[str, ...]:
    """Return the other models that have some of the same segments."""
    mine = {info.name for info in model.segments}
    return tuple(
        other.full_name if other.name == model.name else other.name
        for other in models
        if other is not model and any(info.name in mine for info in other.segments)
    )
