"""What a load holds: its open shards, and a segment, a part or a wait for each of them."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Source
from shmload._decoding.job import Job
from shmload._host.descriptors import Inode, occupy_standard_streams, unlock
from shmload._host.files import is_cached, read_ahead
from shmload._host.limits import allow_descriptors, require_file_size
from shmload._loading.plan import ShardPlan
from shmload._loading.room import made_room
from shmload._loading.shard import OpenShard, open_checkpoint
from shmload._segments.eviction import Budget
from shmload._segments.listing import SegmentInfo
from shmload._segments.part import Awaited, Held, Hollow, Opened, Part, acquire
from shmload._segments.removal import give_back, remove_idle
from shmload._segments.segment import Segment, Stay, attach
from shmload._segments.view import descriptor_path
from shmload._wording import logger_of
from shmload.errors import SegmentUntrusted

if TYPE_CHECKING:
    from shmload._checkpoints.header import Header

logger = logger_of(__name__)

_Kind = TypeVar("_Kind", Segment, Part, Hollow, Awaited)


class Holdings:
    """The shards of one load and what it has of their segments; owns all their descriptors.

    The load's thread changes them while the caller asks about them. A name keeps its entry, whose
    kind changes: `Awaited` to `Part` or `Segment`, `Part` to `Segment`.

    Args:
        stay: how long the segments stay.
        is_hollow: use a stand-in (`Hollow`) for each part: its bytes go through a ring.
        may_link: files that have the wanted dtypes get no segment where the library can map them,
            even if the other segments are to stay.
    """

    def __init__(self, stay: Stay, *, is_hollow: bool, may_link: bool = False) -> None:
        self._stay = stay
        self._may_link = may_link
        self._is_hollow = is_hollow
        self._shards: list[OpenShard] = []
        self._held: dict[str, Held] = {}
        self._made: list[str] = []
        self._decoded: set[str] = set()
        # So that large ones need not be parsed again when their tensors are wrapped.
        self._headers: list[Header] = []

    # Beginning ------------------------------------------------------------------------------------

    def open_shards(
        self, source: Source, rules: Mapping[str, Rule], piece_nbytes: int | None
    ) -> None:
        """Open and plan all shards of a source.

        Args:
            source: the source.
            rules: the rule of each component's checkpoint.
            piece_nbytes: size of the pieces to decode in, in bytes; None for the default.

        Raises:
            CheckpointError: a shard cannot be opened, or its header is wrong.
        """
        occupy_standard_streams()
        # A shard, its segment, and a lease for the tensors in it.
        allow_descriptors(3 * sum(len(each.shards) for each in source.checkpoints))
        keep = (self._stay is Stay.RESIDENT and not self._may_link) or self._is_hollow
        for checkpoint in source.checkpoints:
            rule = rules[checkpoint.component]
            self._shards += open_checkpoint(checkpoint, rule, keep=keep, piece_nbytes=piece_nbytes)

    def acquire(self) -> list[OpenShard]:
        """Attach each segment, or take the lock of its part.

        Does not wait for other builders; `awaited` yields the shards that they build. Waits at most
        1 s for each segment that is being evicted.

        Returns:
            The shards that this load has to decode; `make_parts` comes next.

        Raises:
            SegmentError: a resident segment is damaged or another user's.
            SharedMemoryFull: /dev/shm has no inodes left.
        """
        mine: list[OpenShard] = []
        for shard in self._shards:
            name = shard.plan.segment
            if shard.is_link:
                if not is_cached(shard.fd, shard.source.st_size):
                    read_ahead(shard.fd)
            elif name not in self._held:  # two paths may lead to one file
                self._held[name] = self._acquire(name)
                match self._held[name]:
                    case Part() | Hollow():
                        mine.append(shard)
                    case Segment() as segment:
                        self._headers.append(segment.read_header())  # raises if it is damaged
                        segment.touch()
                        if self._stay is Stay.RESIDENT:
                            segment.keep()
        return mine

    def _acquire(self, name: str) -> Held:
        if self._is_hollow:
            with contextlib.suppress(SegmentUntrusted):  # the bytes go elsewhere
                return attach(name) or Hollow(name)
            return Hollow(name)
        return acquire(name, needs_name=self._stay is not Stay.PRIVATE)

    def make_parts(
        self, shards: Sequence[OpenShard], budget: Budget | None, is_cancelled: Callable[[], bool]
    ) -> list[SegmentInfo]:
        """Make room for some shards' parts; give them their length and header.

        Args:
            shards: from `acquire`.
            budget: as for `made_room`.
            is_cancelled: as for `made_room`.

        Returns:
            The segments that were evicted for them.

        Raises:
            CapacityError: there is no room.
            DecodeCancelled: `is_cancelled` was true during a wait for room.
        """
        for shard in shards:
            require_file_size(shard.plan.path, shard.layout.nbytes)
        nbytes = 0 if self._is_hollow else sum(shard.layout.nbytes for shard in shards)
        with made_room(nbytes, budget, is_cancelled=is_cancelled) as evicted:
            for shard in shards:
                self._part(shard).prepare(shard.layout)
        return evicted

    def jobs(self, shards: Iterable[OpenShard]) -> list[Job]:
        """Return the jobs that decode some shards into their parts."""
        return [shard.job(self._part(shard)) for shard in shards]

    def publish(self, shard: OpenShard, digest: str) -> None:
        """Declare a shard's part complete.

        Args:
            shard: the shard.
            digest: of its segment's data.

        Raises:
            SegmentRemoved, SegmentUntrusted: its name was removed from outside, or taken by another
                user.
        """
        name = shard.plan.segment
        part = self._part(shard)
        assert isinstance(part, Part)
        stay = self._stay if part.has_name else Stay.PRIVATE
        self._held[name] = part.publish(digest, stay)
        self._decoded.add(name)
        if stay is not Stay.PRIVATE:
            self._made.append(name)

    def awaited(self) -> Iterator[OpenShard]:
        """Yield each shard whose segment another process is building."""
        for shard in self._shards:
            if isinstance(self._held.get(shard.plan.segment), Awaited):
                yield shard

    def wait_for(
        self, shard: OpenShard, timeout_s: float, is_cancelled: Callable[[], bool]
    ) -> bool:
        """Wait for another process's part; return whether this process has to decode it instead.

        Raises:
            SegmentTimeout: as `Awaited.wait`.
        """
        name = shard.plan.segment
        held = self._held[name]
        while isinstance(held, Awaited):
            self._held[name] = held = held.wait(timeout_s, is_cancelled)
            if self._stay > Stay.PRIVATE and isinstance(held, Segment) and not held.has_name:
                held.close()  # a private segment of the other process, which has no name
                self._held[name] = held = acquire(name)
        if self._stay is Stay.RESIDENT and isinstance(held, Segment):
            held.keep()
        return isinstance(held, Part)

    def _part(self, shard: OpenShard) -> Part | Hollow:
        part = self._held[shard.plan.segment]
        assert isinstance(part, Part | Hollow)
        return part

    # Asking ---------------------------------------------------------------------------------------

    @property
    def plans(self) -> list[ShardPlan]:
        """The plan of each shard, from when the load began."""
        return [shard.plan for shard in self._shards]

    @property
    def metadata(self) -> dict[str, str]:
        """What the headers of the shards have beside tensors; a later shard's value counts."""
        return {
            key: value
            for shard in self._shards
            for key, value in (shard.header.metadata or {}).items()
        }

    @property
    def is_empty(self) -> bool:
        """Whether no shard needs a segment."""
        return not self._held

    @property
    def has_every_file(self) -> bool:
        """Whether a view can lead to every segment: it is complete, a part or a stand-in."""
        return not self.all_of(Awaited)

    @property
    def is_complete(self) -> bool:
        """Whether every segment is complete."""
        return len(self.segments()) == len(self._held)

    @property
    def leaves_casts(self) -> bool:
        """Whether the rules say that the library certainly casts some tensor."""
        return any(shard.leaves_casts for shard in self._shards)

    def all_of(self, kind: type[_Kind]) -> list[_Kind]:
        """Return the segments, parts, stand-ins or waits."""
        return [held for held in self._held.values() if isinstance(held, kind)]

    def segments(self) -> list[Segment]:
        """Return the complete segments; the holdings own them."""
        return self.all_of(Segment)

    def files(self) -> dict[Path, Path]:
        """Return the path of each shard's bytes by the shard's own path, for a view."""
        found = {}
        for shard in self._shards:
            path, held = shard.plan.path, self._held.get(shard.plan.segment)
            found[path] = descriptor_path(held.fd) if isinstance(held, Opened) else path
        return found

    def open_files(self) -> list[tuple[str, int]]:
        """Return name and descriptor of the file that has, or will have, each shard's tensors."""
        found = []
        for shard in self._shards:
            held = self._held.get(shard.plan.segment)
            if isinstance(held, Opened):
                found.append((held.name, held.fd))
            else:
                found.append((str(shard.plan.path), shard.fd))
        return found

    def inodes(self) -> set[Inode]:
        """Return the inodes of segments and parts, and of shards that are linked."""
        linked = {shard.inode for shard in self._shards if shard.is_link}
        return linked | {held.inode for held in self._held.values() if isinstance(held, Opened)}

    def unfinished_inodes(self) -> set[Inode]:
        """Return the inodes of parts and stand-ins, whose bytes are still missing."""
        return {held.inode for held in (*self.all_of(Part), *self.all_of(Hollow))}

    def unfinished_components(self) -> set[str]:
        """Return the components with parts or stand-ins."""
        return {
            shard.plan.component
            for shard in self._shards
            if isinstance(self._held.get(shard.plan.segment), Part | Hollow)
        }

    @property
    def hollow(self) -> list[Inode]:
        """The inodes of the stand-ins; a filled slot of the ring names its place in this list."""
        return [held.inode for held in self.all_of(Hollow)]

    @property
    def was_read_early(self) -> bool:
        """Whether some code has read a stand-in's zeros for weights."""
        return any(held.was_read for held in self.all_of(Hollow))

    def attached_and_decoded(self) -> tuple[list[str], list[str]]:
        """Return the names of complete segments: the attached ones, and those decoded here."""
        complete = {segment.name for segment in self.segments()}
        return sorted(complete - self._decoded), sorted(complete & self._decoded)

    # Ending ---------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the shards, remove the parts, give all leases back; a second call does nothing."""
        with contextlib.ExitStack() as closing:  # each of them, even if another raises
            self._headers.clear()
            while self._shards:
                closing.callback(self._shards.pop().close)
            while self._held:
                _, held = self._held.popitem()
                if isinstance(held, Segment):
                    closing.callback(give_back, held)
                else:
                    closing.callback(held.close)

    def unlock_made(self) -> None:
        """Unlock the published segments, which mappings of this load may still keep locked."""
        for name in self._made:
            held = self._held.get(name)
            if isinstance(held, Segment):
                unlock(held.fd)

    def remove_made(self) -> None:
        """Remove the published segments that no other process uses. Call it after `close`."""
        # Tensors of this process may live on in the frames of the error that ends the load.
        remove_idle(self._made, ignored={os.getpid()})
        self._made.clear()
