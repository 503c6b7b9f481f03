"""What is being decoded right now: the parts in /dev/shm that a living process builds."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator

import msgspec

from shmload._host.descriptors import try_lock
from shmload._host.shm import shm_open
from shmload._segments.names import part_names
from shmload._segments.roots import Root, find_roots, tell_apart
from shmload._segments.segment import Segment
from shmload._segments.users import User, find_builders
from shmload.errors import SegmentCorrupt, SegmentError


class UnfinishedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or some of its shards, while they are being decoded."""

    name: str
    """As `Model.name`."""
    dtype: str
    """As `Model.dtype`."""
    source: str
    """Path of the directory or file that it is loaded from."""
    variant: str
    """As `Model.variant`."""
    parts: int
    """How many segments are being made."""
    nbytes: int
    """Size that they will have, in bytes."""
    done_nbytes: int
    """How much of them is filled, in bytes."""
    elapsed_s: float
    """How long ago the first of them was planned, in seconds."""
    built_by: tuple[User, ...]
    """The processes that load them, as far as this one can see them."""
    bytes_per_s: float
    """How fast they have been filled so far, in bytes per second."""


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str
    dtype: str
    nbytes: int
    done_nbytes: int
    created_at: float


def find_decoding(resident: Iterable[str] = ()) -> list[UnfinishedModel]:
    """List what is being decoded by processes of this user, by model.

    A part whose header is not written yet is left out. Weights that go straight to a device lie in
    no part.

    Args:
        resident: the sources of segments, whose models' names are for these alone.
    """
    names = list(part_names())
    if not names:
        return []
    users = find_builders(names)
    found = list(_living_parts(names, users))
    roots = find_roots(part.source for part in found)
    by_key = {root.key: root for root in (*find_roots(resident).values(), *roots.values())}
    called = tell_apart(by_key.values())
    groups: dict[tuple[str, str], list[_Part]] = {}
    for part in found:
        groups.setdefault((roots[part.source].key, part.dtype), []).append(part)
    return [_sum_up(called[key], by_key[key], parts, users) for (key, _), parts in groups.items()]


def _sum_up(
    name: str, root: Root, parts: list[_Part], users: dict[str, tuple[User, ...]]
) -> UnfinishedModel:
    done = sum(part.done_nbytes for part in parts)
    elapsed_s = max(0.0, time.time() - min(part.created_at for part in parts))
    builders = {user.pid: user for part in parts for user in users.get(part.name, ())}
    return UnfinishedModel(
        name=name,
        dtype=parts[0].dtype,
        source=root.path,
        variant=root.variant,
        parts=len(parts),
        nbytes=sum(part.nbytes for part in parts),
        done_nbytes=done,
        elapsed_s=elapsed_s,
        built_by=tuple(builders[pid] for pid in sorted(builders)),
        bytes_per_s=done / elapsed_s if elapsed_s > 0 else 0.0,
    )


def _living_parts(names: list[str], users: dict[str, tuple[User, ...]]) -> Iterator[_Part]:
    for name in names:
        with contextlib.suppress(SegmentError):
            fd = shm_open(name)
            if fd is None:
                continue
            with Segment(name, fd) as part:
                # /proc/locks names most builders; asking the lock itself is for the others, since
                # it holds a dead builder's part for a moment.
                if name in users or not try_lock(fd, exclusive=False):
                    with contextlib.suppress(SegmentCorrupt):  # no header yet
                        yield _describe(part)


def _describe(part: Segment) -> _Part:
    metadata = part.read_metadata()
    found = os.fstat(part.fd)
    return _Part(
        name=part.name,
        source=metadata.source,
        dtype=metadata.dtype,
        nbytes=found.st_size,
        # stat(2): units of 512 bytes, whole pages
        done_nbytes=min(found.st_size, 512 * found.st_blocks),
        created_at=metadata.created_at,
    )
