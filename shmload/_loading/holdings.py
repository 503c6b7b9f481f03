"""What a load holds: its open shards, and a segment, a part or a wait for each of them."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from shmload._checkpoints.header import Header
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Source
from shmload._decoding.shard import Shard, open_checkpoint
from shmload._host.descriptors import Inode, occupy_standard_streams, unlock
from shmload._host.files import read_ahead
from shmload._host.limits import allow_descriptors, require_file_size
from shmload._host.reading import cached_part
from shmload._loading.room import made_room
from shmload._segments.eviction import Budget
from shmload._segments.lease import Lease
from shmload._segments.listing import SegmentInfo, holders
from shmload._segments.part import Awaited, Held, Part, acquire
from shmload._segments.removal import give_back, remove_idle
from shmload._segments.segment import Segment, Stay, attach
from shmload._segments.view import descriptor_path
from shmload._settings import local_world_size
from shmload.errors import SegmentUntrusted

# How late a rank may be. Ranks start together; their imports differ by seconds.
_PATIENCE_S = 60.0
_POLL_S = 0.2
# Each rank polls by itself: a rank that left at once might be missed by another one's poll.
_FAREWELL_S = 1.0


class Holdings:
    """The shards of one load and what it has of their segments; owns all their descriptors.

    The load's thread changes them while the caller asks about them. A name keeps its entry, whose
    kind changes: `Awaited` to `Part` or `Segment`, `Part` to `Segment`.

    Args:
        stay: how long the segments stay.
        is_bounded: make parts without names, whose pages may be freed before all are decoded.
        may_link: files that have the wanted dtypes get no segment where the library can map them,
            even if the other segments are to stay.
    """

    def __init__(self, stay: Stay, *, is_bounded: bool, may_link: bool = False) -> None:
        self._stay = stay
        self._may_link = may_link
        self._is_bounded = is_bounded
        self.shards: list[Shard] = []
        self.held: dict[str, Held] = {}
        """By the name of the segment; links have none."""
        self._decoded: set[str] = set()
        # So that large ones need not be parsed again when their tensors are wrapped.
        self._headers = list[Header]()

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
        # A shard, its segment, and for the tensors in it a mapping and a lease.
        allow_descriptors(4 * sum(len(each.shards) for each in source.checkpoints))
        may_link = (self._may_link or self._stay < Stay.RESIDENT) and not self._is_bounded
        for checkpoint in source.checkpoints:
            rule = rules[checkpoint.component]
            self.shards += open_checkpoint(
                source, checkpoint, rule, may_link=may_link, piece_nbytes=piece_nbytes
            )

    def acquire(self) -> list[Shard]:
        """Attach each segment, or take the lock of its part.

        Does not wait for other builders; `awaited` returns the shards that they build. Waits at
        most 1 s for each segment that is being evicted.

        Returns:
            The shards that this load has to decode; `make_parts` comes next.

        Raises:
            SegmentError: a resident segment is damaged or another user's.
            SharedMemoryFull: /dev/shm has no inodes left.
        """
        mine: list[Shard] = []
        for shard in self.shards:
            if shard.is_linked:
                if cached_part(shard.fd, shard.stat.st_size) != 1.0:
                    read_ahead(shard.fd)
            elif shard.name not in self.held:  # two paths may lead to one file
                self.held[shard.name] = held = self._acquire(shard.name)
                match held:
                    case Part():
                        shard.part = held
                        mine.append(shard)
                    case Segment() as segment:
                        self._headers.append(segment.read_header())  # raises if it is damaged
                        segment.touch()
                        if self._stay is Stay.RESIDENT:
                            segment.keep()
        return mine

    def _acquire(self, name: str) -> Held:
        if self._is_bounded:
            with contextlib.suppress(SegmentUntrusted):  # the bytes go elsewhere
                return attach(name) or Part(name, None)
            return Part(name, None)
        return acquire(name, needs_name=self._stay is not Stay.PRIVATE)

    def make_parts(
        self, shards: Sequence[Shard], budget: Budget | None, is_cancelled: Callable[[], bool]
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
            require_file_size(shard.path, shard.layout.nbytes)
        nbytes = 0 if self._is_bounded else sum(shard.layout.nbytes for shard in shards)
        with made_room(nbytes, budget, is_cancelled=is_cancelled) as evicted:
            for shard in shards:
                assert shard.part
                shard.part.prepare(shard.layout)
        return evicted

    def publish(self, shard: Shard, digest: str) -> None:
        """Declare a shard's part complete.

        Args:
            shard: the shard.
            digest: of its segment's data.

        Raises:
            SegmentError, SegmentUntrusted: its name was removed from outside, or taken by another
                user.
        """
        assert shard.part
        stay = self._stay if shard.part.has_name else Stay.PRIVATE
        self.held[shard.name] = shard.part.publish(digest, stay)
        shard.part = None  # the descriptor is the segment's now
        self._decoded.add(shard.name)

    def awaited(self) -> list[Shard]:
        """Return the shards whose segments other processes are building."""
        return [each for each in self.shards if isinstance(self._of(each), Awaited)]

    def wait_for(self, shard: Shard, timeout_s: float, is_cancelled: Callable[[], bool]) -> bool:
        """Wait for another process's part; return whether this process has to decode it instead.

        Raises:
            SegmentTimeout: as `Awaited.wait`.
        """
        name = shard.name
        held = self.held[name]
        while isinstance(held, Awaited):
            self.held[name] = held = held.wait(timeout_s, is_cancelled)
            if self._stay > Stay.PRIVATE and isinstance(held, Segment) and not held.has_name:
                held.close()  # a private segment of the other process, which has no name
                self.held[name] = held = acquire(name)
        if self._stay is Stay.RESIDENT and isinstance(held, Segment):
            held.keep()
        shard.part = held if isinstance(held, Part) else None
        return shard.part is not None

    def _of(self, shard: Shard) -> Held | None:
        return self.held.get(shard.name)

    # Asking ---------------------------------------------------------------------------------------

    def opened(self) -> Iterator[tuple[Shard, Segment | Part | None]]:
        """Yield each shard with its segment or part; None for a link or a wait."""
        for shard in self.shards:
            held = self._of(shard)
            yield shard, None if isinstance(held, Awaited) else held

    def segments(self) -> list[Segment]:
        """Return the complete segments; the holdings own them."""
        return [held for held in self.held.values() if isinstance(held, Segment)]

    def files(self) -> dict[Path, Path]:
        """Return the path of each shard's bytes by the shard's own path, for a view.

        A file that is linked is the one that was planned, also if another takes its place.
        """
        return {shard.path: descriptor_path((held or shard).fd) for shard, held in self.opened()}

    def inodes(self) -> set[Inode]:
        """Return the inodes of segments and parts, and of shards that are linked."""
        return {held.inode if held else shard.inode for shard, held in self.opened()}

    def descriptors(self) -> list[tuple[Inode, int]]:
        """Return the descriptor of each file that is mapped, by its inode; the holdings own it."""
        opened = ((held or shard) for shard, held in self.opened())
        return [(each.inode, each.fd) for each in opened]

    def unfinished(self) -> list[tuple[Shard, Part]]:
        """Return the parts, of which bytes may be missing, with their shards."""
        return [(shard, held) for shard, held in self.opened() if isinstance(held, Part)]

    def unfilled_nbytes(self) -> int:
        """Return how many bytes of the parts have no memory yet."""
        found = [os.fstat(part.fd) for _, part in self.unfinished()]
        return sum(each.st_size - 512 * each.st_blocks for each in found)

    # Ending ---------------------------------------------------------------------------------------

    def close(self, *, is_discarded: bool = False) -> None:
        """Close the shards, remove the parts, give all leases back; a second call does nothing.

        Args:
            is_discarded: also remove the segments that were decoded here, unless another process
                uses them.
        """
        made = [each for each in self.segments() if is_discarded and each.name in self._decoded]
        # Not those of the same name that another process has made meanwhile.
        names = [segment.name for segment in made if segment.has_name]
        with contextlib.ExitStack() as closing:  # each of them, even if another raises
            if names:
                # Tensors of this process may live on in the frames of the error that ends the load.
                closing.callback(remove_idle, names, ignored={os.getpid()})
            for segment in made:
                unlock(segment.fd)  # mappings of this load may still keep it locked
            self._headers.clear()
            while self.shards:
                closing.callback(self.shards.pop().close)
            for segment in self.segments():
                segment.touch()
            closing.callback(give_back, *self.segments())
            while self.held:
                _, held = self.held.popitem()
                if not isinstance(held, Segment):
                    closing.callback(held.close)


def linger(segments: Iterable[Segment]) -> None:
    """Keep leases of shared segments until every rank on this host has one; returns at once.

    A rank may be done with them before another one attaches: it has moved its weights to a device,
    or dropped them. The leases end after a minute at the latest, or with the process.

    Args:
        segments: stay the caller's.
    """
    # A forked child has no thread that waits: it would keep the leases as long as it lives.
    leases = [Lease(each, crosses_forks=False) for each in segments if each.is_shared]
    if leases:
        threading.Thread(
            target=_wait_for_ranks, args=(leases,), name="shmload-linger", daemon=True
        ).start()


def _wait_for_ranks(leases: Sequence[Lease]) -> None:
    ranks, names = local_world_size(), [lease.name for lease in leases]
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        found = holders(names)
        if all(len(found.get(name, ())) >= ranks for name in names):
            time.sleep(_FAREWELL_S)
            break
        time.sleep(_POLL_S)
    for lease in leases:
        lease.close()
