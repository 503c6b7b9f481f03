"""The resident models, which are groups of segments, and how a person names one.

The load that decodes a segment writes into its header which model it is for. So a file that two
models share is listed under the one that it was decoded for. A segment whose header says no model
is listed by the path of its file.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from shmload._checkpoints.remote import is_url
from shmload._checkpoints.wanted import is_publication
from shmload._segments.listing import SegmentInfo, User, segments
from shmload._segments.names import name_prefix
from shmload._wording import format_nbytes, nearest
from shmload.errors import SegmentNotFound

_ID = re.compile(r"[0-9a-f]{4,30}")


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The resident segments of one model."""

    name: str
    """The hub id, the URL, or the name of its directory or file; its path if another model has that
    name too. A variant follows behind a colon."""
    id: str
    """Eight hexadecimal digits, the same as long as its source and dtype are."""
    dtype: str
    """torch's name of the dtype of its weights; several with commas, the largest share first."""
    components: tuple[str, ...]
    """Its resident components, the largest first; empty for a model without components."""
    nbytes: int
    """Size of its segments, in bytes."""
    source: str
    """Path of the directory or file that it is loaded from."""
    segments: tuple[SegmentInfo, ...]
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
    variant: str
    """The variant that was asked for, such as `fp16`; empty for plain files."""

    @property
    def full_name(self) -> str:
        """Its name and dtype, for messages."""
        return f"{self.name} ({self.dtype})" if self.dtype else self.name

    @property
    def eviction(self) -> str:
        """What is said if these segments of it went to make room."""
        parts = f": {', '.join(self.components)}" if self.components else ""
        return f"evicted {self.full_name}{parts}, {format_nbytes(self.nbytes)}, for room"


def find_models(
    found: Sequence[SegmentInfo], users: Mapping[str, tuple[User, ...]] | None = None
) -> list[Model]:
    """Group segments into models, in the order of their first segments.

    A variant is a model of its own, and so are files that have changed since. If a file is there in
    several dtypes, each dtype is one.

    Args:
        found: the segments.
        users: the processes that use them, by segment; None to leave them out.
    """
    homes = {info.source: info for info in found if info.root}
    groups: dict[tuple[str, str, bool], list[SegmentInfo]] = {}
    names: dict[str, str] = {}
    for info in found:
        # What a load has built belongs to a file of its model.
        home = info if info.root else homes.get(info.source, info)
        root = home.root or home.source or home.name
        names[root] = home.model or root
        groups.setdefault((root, home.variant, info.is_current), []).append(info)
    for name in [name for name, count in Counter(names.values()).items() if count > 1]:
        names |= {root: root for root, other in names.items() if other == name}
    return [
        _make(
            root, f"{names[root]}:{variant}" if variant else names[root], variant, own, users or {}
        )
        for (root, variant, _), infos in groups.items()
        for own in _divide(infos)
    ]


def _divide(found: Sequence[SegmentInfo]) -> Iterable[Sequence[SegmentInfo]]:
    """Divide the segments of one model by dtype, if a file is there in several."""
    weights = [info for info in found if not info.kept]
    if len({info.identity for info in weights}) == len(weights):
        return [found]
    parts: dict[str, list[SegmentInfo]] = {}
    for info in found:
        needed = [each for each in weights if each.name in info.needs]
        largest = max(needed, key=lambda each: each.nbytes, default=info)
        parts.setdefault(largest.dtype, []).append(info)
    return parts.values()


def _make(
    root: str,
    name: str,
    variant: str,
    found: Sequence[SegmentInfo],
    users: Mapping[str, tuple[User, ...]],
) -> Model:
    components: dict[str, int] = {}
    dtypes: dict[str, int] = {}
    for info in found:
        components[info.component] = components.get(info.component, 0) + info.nbytes
        if not info.kept:
            dtypes[info.dtype] = dtypes.get(info.dtype, 0) + info.nbytes
    dtype = ", ".join(_largest_first(dtypes))
    key = f"{root}\0{variant}\0{dtype}\0{found[0].is_current}"
    by_pid = {user.pid: user for info in found for user in users.get(info.name, ())}
    return Model(
        name=name,
        id=hashlib.blake2b(key.encode(errors="surrogateescape"), digest_size=4).hexdigest(),
        dtype=dtype,
        components=_largest_first(components),
        nbytes=sum(info.nbytes for info in found),
        source=root,
        segments=tuple(found),
        used_by=tuple(by_pid[pid] for pid in sorted(by_pid)),
        is_leased=any(info.is_leased for info in found),
        created_at=min(info.created_at for info in found),
        used_at=max(info.used_at for info in found),
        is_pinned=all(info.is_pinned for info in found),
        pinned_segments=sum(info.is_pinned for info in found),
        keep_for_s=min((info.keep_for_s for info in found if info.keep_for_s), default=0),
        is_current=found[0].is_current,
        variant=variant,
    )


def _largest_first(nbytes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(sorted(filter(None, nbytes), key=lambda name: (-nbytes[name], name)))


# Choosing by name ---------------------------------------------------------------------------------
#
# a segment's name                                      that segment
# the path of a file, or of a directory above it        what was decoded from there
# the URL of a source, or one above it                  what was decoded from there
# `shm:NAME`, `shm:NAME@VERSION`                        all versions of a publication, or one
# a model's name, such as `org/name`                    that model, in every dtype
# an id, or its first four digits or more               that model or segment
# a part of a model's name that no other model has      that model, in every dtype


def select(
    patterns: Sequence[str | os.PathLike[str]], found: Sequence[SegmentInfo] | None = None
) -> list[SegmentInfo]:
    """Choose resident segments; each once.

    Args:
        patterns: as above; none means all.
        found: the segments to choose from; None for all that are resident.

    Raises:
        SegmentNotFound: a pattern matches nothing; or a part of a name is in several models' names,
            or the beginning of an id in several ids.
    """
    found = segments() if found is None else found
    chosen: dict[str, SegmentInfo] = {}
    for given in patterns:
        pattern = os.fspath(given)
        matching = [info for info in found if is_below(info, pattern)] or _named(pattern, found)
        chosen |= {info.name: info for info in matching}
    return list(chosen.values()) if patterns else list(found)


def is_below(info: SegmentInfo, pattern: str) -> bool:
    """Tell whether a pattern is a segment's name, or its file's path, or a directory above it."""
    if not pattern:  # it would be the current directory
        return False
    if pattern in (info.name, info.source):
        return True
    if is_publication(info.source) or is_publication(pattern):
        return info.source.startswith(f"{pattern}@")
    if is_url(pattern):
        return f"{info.model}/".startswith(f"{pattern.rstrip('/')}/")
    given = os.path.expanduser(pattern)
    try:
        return any(
            f"{resolve(source)}/".startswith(f"{resolve(given)}/")
            for resolve in (os.path.abspath, os.path.realpath)
            for source in filter(None, (info.source, info.root))
        )
    except ValueError:  # no file has a zero byte in its name
        return False


def _named(pattern: str, found: Sequence[SegmentInfo]) -> list[SegmentInfo]:
    """Return the segments that a name or id means.

    Raises:
        SegmentNotFound: as `select`.
    """
    listed = find_models(found)
    end = f"/{pattern}" if pattern else "\0"
    fitting = [each for each in listed if each.name == pattern or each.source.endswith(end)]
    if not fitting and _ID.fullmatch(pattern):
        fitting = [model for model in listed if model.id.startswith(pattern)]
        by_key = [info for info in found if info.name.startswith(name_prefix() + pattern)]
        if len(fitting) + len(by_key) > 1:
            ids = (*(model.id for model in fitting), *(info.name for info in by_key))
            raise _several(pattern, ids)
        if by_key:
            return by_key
    if not fitting:
        part = pattern.casefold()
        fitting = [model for model in listed if part and part in model.name.casefold()]
        names = sorted({model.name for model in fitting})
        if len(names) > 1:
            raise _several(pattern, names)
    if not fitting:
        near = nearest(pattern, [model.name for model in listed]) or ";"
        raise SegmentNotFound(
            f"no resident model or segment matches {pattern!r}{near} `shmload ls` lists them"
        )
    return [info for model in fitting for info in model.segments]


def _several(pattern: str, fitting: Iterable[str]) -> SegmentNotFound:
    candidates = tuple(fitting)
    return SegmentNotFound(
        f"{pattern!r} fits several: {', '.join(candidates)}; give more of the name, or an id from "
        "`shmload ls --long`",
        candidates=candidates,
    )
