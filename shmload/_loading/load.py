"""One load: from shards to complete segments, while the caller does something else.

        plan ----> begin ----> decode, in a thread ----> publish ----> wait for other builders
          |          |                                      |
     no room:     files() may be used from here:        wait() returns
     an error     their bytes come later

Owns every descriptor, part and worker of the load until `close`, which runs whatever happens.
"""

import contextlib
import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from shmload._checkpoints.resolve import Source
from shmload._checkpoints.rules import Rule
from shmload._decoding.coordinator import DecodeCancelled, Job
from shmload._decoding.ring import Ring
from shmload._host.background import Background
from shmload._host.linux import Inode, inode_of, is_cached, read_ahead, unlock
from shmload._loading.decoder import Decoder
from shmload._loading.plan import Plan
from shmload._loading.progress import Progress
from shmload._loading.shard import OpenShard
from shmload._segments.acquire import Awaited, Held, Opened, acquire
from shmload._segments.capacity import make_room
from shmload._segments.listing import check_digest
from shmload._segments.part import Hollow, Part
from shmload._segments.removal import give_back, remove_if_free
from shmload._segments.segment import Segment, Stay, attach
from shmload._segments.view import descriptor_path
from shmload._service.client import Service
from shmload._settings import settings, worker_count
from shmload._wording import format_nbytes
from shmload.errors import ArgumentError, SegmentTimeout

logger = logging.getLogger(__name__)


class Load:
    """A load in progress; a context that ends it.

    Args:
        source: what to load.
        rules: the rule of each component's checkpoint.
        stay: how long the segments shall stay.
        progress: is told of bytes.
        parent_is_busy: whether the caller computes meanwhile.
        workers: worker processes of its own; None for as many as the settings say.
        service: what decodes instead; None for the running one, if the settings allow for it.
        ring: where bytes go that are not resident yet, instead of into segments, and with no help
            of a service; stays the caller's.

    Raises:
        CheckpointError, CapacityError, SegmentError: before anything was decoded.
    """

    def __init__(
        self,
        source: Source,
        rules: Mapping[str, Rule],
        *,
        stay: Stay,
        progress: Progress,
        parent_is_busy: bool,
        workers: int | None = None,
        service: Service | None = None,
        ring: Ring | None = None,
    ) -> None:
        self._source = source
        self._ring = ring
        self._stay = stay
        self._progress = progress
        if workers is not None and workers < 1:
            raise ArgumentError(f"workers is {workers}; it must be 1 or more, or None")
        self._decoder = Decoder(
            keep=stay is Stay.RESIDENT,
            workers=workers or worker_count(parent_is_busy=parent_is_busy),
            progress=progress,
            service=service,
        )
        self._shards: list[OpenShard] = []
        self._made: list[str] = []
        self._decoded: set[str] = set()
        self._held: dict[str, Held] = {}
        self._showing = threading.Lock()
        self._is_shown = False
        self._work: Background | None = None
        self.read_nbytes = 0
        """Bytes of weights that this load reads."""
        try:
            for checkpoint in source.checkpoints:
                for path in checkpoint.shards:
                    self._shards.append(
                        OpenShard(
                            checkpoint.component,
                            path,
                            rules[checkpoint.component],
                            keep=stay is Stay.RESIDENT or ring is not None,
                            piece_nbytes=ring.shape.slot_nbytes if ring else None,
                        )
                    )
            self._begin()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None:
            self.close()
        else:
            self.discard()  # an error leaves nothing in shared memory

    @property
    def plan(self) -> Plan:
        """What was to be done when the load began."""
        return Plan(source=str(self._source.given), shards=tuple(s.plan for s in self._shards))

    @property
    def has_every_file(self) -> bool:
        """Whether every segment exists at least as a part, so that a view can lead to it."""
        return not any(isinstance(held, Awaited) for held in self._held.values())

    @property
    def is_complete(self) -> bool:
        """Whether every segment is complete."""
        return all(isinstance(held, Segment) for held in self._held.values())

    def files(self) -> dict[Path, Path]:
        """Return where each shard's bytes are, for a view, by the shard's path."""
        found = {}
        for shard, held in self._show():
            path = shard.plan.path
            found[path] = descriptor_path(held.fd) if isinstance(held, Opened) else path
        return found

    def segments(self) -> list[Segment]:
        """Return the complete segments; they belong to the load."""
        return [held for held in self._held.values() if isinstance(held, Segment)]

    def open_files(self) -> list[tuple[str, int]]:
        """Return name and descriptor of what has, or will have, each shard's tensors."""
        found = []
        for shard, held in self._show():
            if isinstance(held, Opened):
                found.append((held.name, held.fd))
            else:
                found.append((str(shard.plan.path), shard.fd))
        return found

    def _show(self) -> Iterator[tuple[OpenShard, Held | None]]:
        """Yield each shard and what is held of it, for others to map."""
        with self._showing:
            self._is_shown = True
        for shard in self._shards:
            yield shard, self._held.get(shard.plan.segment)

    def verify(self) -> None:
        """Recompute the digest of every segment.

        Raises:
            SegmentCorrupt: one is not what was decoded.
        """
        for segment in self.segments():
            if self._decoder.is_cancelled:
                raise DecodeCancelled
            check_digest(segment)

    @property
    def leaves_casts(self) -> bool:
        """Whether the library will still cast some tensor, as far as the rules can tell."""
        return any(shard.leaves_casts for shard in self._shards)

    def inodes(self) -> set[Inode]:
        """Return the inodes of segments and parts, and of shards that are linked."""
        linked = {inode_of(os.fstat(shard.fd)) for shard in self._shards if shard.is_link}
        held = (held for held in self._held.values() if not isinstance(held, Awaited))
        return linked | {there.inode for there in held}

    def unfinished_inodes(self) -> set[Inode]:
        """Return the inodes of what is mapped and has bytes that are still to come."""
        return {held.inode for held in self._held.values() if isinstance(held, Part | Hollow)}

    def unfinished_components(self) -> set[str]:
        """Return the components with parts whose bytes are still to come."""
        return {
            shard.plan.component
            for shard in self._shards
            if isinstance(self._held.get(shard.plan.segment), Part | Hollow)
        }

    @property
    def hollow(self) -> list[Inode]:
        """What stands in for segments, by the number that their filled slots name."""
        return [held.inode for held in self._held.values() if isinstance(held, Hollow)]

    def wait(self) -> None:
        """Block until every segment is complete; the deadlines are those of the workers.

        Raises:
            CheckpointError, CapacityError, WorkerError, SegmentError: what went wrong.
        """
        if self._work:
            self._work.wait()

    def close(self) -> None:
        """End the load: stop what still runs, remove its parts, give all leases back."""
        interrupt = self._cancel()
        with contextlib.ExitStack() as closing:  # each, whatever becomes of the others
            while self._shards:
                closing.callback(self._shards.pop().close)
            while self._held:
                _, held = self._held.popitem()
                if isinstance(held, Segment):
                    closing.callback(give_back, held)
                else:
                    closing.callback(held.close)
            closing.callback(self._decoder.close)
        if interrupt:
            raise interrupt

    def _cancel(self) -> KeyboardInterrupt | None:
        """Stop the thread; returns a Ctrl-C that came meanwhile, for later.

        What is closed next is still in use by the thread.
        """
        self._decoder.cancel()
        return self._work.join_undisturbed() if self._work else None

    def discard(self) -> None:
        """End the load and remove the segments that it has made, unless somebody uses them."""
        interrupt = self._cancel()
        for name in self._made:
            held = self._held.get(name)
            if isinstance(held, Segment):
                unlock(held.fd)  # of mappings of this load that are still around
        try:
            self.close()
        finally:
            while self._made:
                remove_if_free(self._made.pop())
        if interrupt:
            raise interrupt

    def _begin(self) -> None:
        """Take the locks and start to decode; other processes' parts are waited for at the end."""
        mine: list[OpenShard] = []
        for shard in self._shards:
            name = shard.plan.segment
            if shard.is_link:
                if not is_cached(shard.fd, shard.source.st_size):
                    read_ahead(shard.fd)
            elif name not in self._held:  # two paths may lead to one file
                self._held[name] = (attach(name) or Hollow(name)) if self._ring else acquire(name)
                match self._held[name]:
                    case Part() | Hollow():
                        mine.append(shard)
                    case Segment() as segment:
                        segment.read_header()  # whether it was damaged
                        segment.touch()
                        if self._stay is Stay.RESIDENT:
                            segment.keep()
        if self._held and not self._ring:
            self._decoder.find_service()
        self._prepare(mine)
        self._log(mine)
        if self.is_complete:
            self._note()
            if self._ring:
                self._ring.filled.put(None)
            return
        self._progress.start(self.read_nbytes)
        self._work = Background(functools.partial(self._run, mine), "shmload-decode")
        self._work.start()

    def _note(self) -> None:
        """Tell the service what it was good for."""
        complete = {name for name, held in self._held.items() if isinstance(held, Segment)}
        self._decoder.note(sorted(complete - self._decoded), sorted(complete & self._decoded))

    def _make_parts(self, shards: list[OpenShard], *, is_charged_here: bool) -> None:
        if not self._ring:
            nbytes = sum(shard.layout.nbytes for shard in shards)
            make_room(nbytes, is_charged_here=is_charged_here)
        for shard in shards:
            self._part(shard).prepare(shard.layout)

    def _log(self, mine: list[OpenShard]) -> None:
        kinds = Counter(type(held) for held in self._held.values())
        logger.info(
            "%s: %d shards to decode (%s), %d resident, %d mapped as they are, %d awaited",
            self._source.given,
            len(mine),
            format_nbytes(sum(shard.plan.read_nbytes for shard in mine)),
            kinds[Segment],
            sum(shard.is_link for shard in self._shards),
            kinds[Awaited],
        )

    def _part(self, shard: OpenShard) -> Part | Hollow:
        part = self._held[shard.plan.segment]
        assert isinstance(part, Part | Hollow)
        return part

    def _run(self, mine: list[OpenShard]) -> None:
        try:
            if mine:
                self._decode(mine)
            for shard in self._shards:
                held = self._held.get(shard.plan.segment)
                if isinstance(held, Awaited):
                    self._wait_for(shard, held)
            self._note()
        finally:
            if self._ring:
                self._ring.filled.put(None)

    def _wait_for(self, shard: OpenShard, awaited: Awaited) -> None:
        """Wait for another process's part, or decode it here if that process dies."""
        name = shard.plan.segment
        held: Segment | Part | Awaited = awaited
        while isinstance(held, Awaited):
            try:
                held = held.wait(settings().wait_timeout_s, lambda: self._decoder.is_cancelled)
            except SegmentTimeout:
                if self._decoder.is_cancelled:
                    raise DecodeCancelled from None
                raise
            self._held[name] = held
            if self._stay > Stay.PRIVATE and isinstance(held, Segment) and not held.has_name:
                held.close()  # the other process made it for itself alone
                self._held[name] = held = acquire(name)
        if self._stay is Stay.RESIDENT and isinstance(held, Segment):
            held.keep()
        if isinstance(held, Part):
            self._prepare([shard])
            self._decode([shard])

    def _prepare(self, shards: list[OpenShard]) -> None:
        """Make sure of room for some shards' parts, and give them their length and header."""
        nbytes = sum(shard.layout.nbytes for shard in shards)
        read_nbytes = sum(shard.plan.read_nbytes for shard in shards)
        self._decoder.reserve(segment_nbytes=nbytes, read_nbytes=read_nbytes)
        is_charged_here = not self._decoder.leaves_to_service(read_nbytes)
        self._make_parts(shards, is_charged_here=is_charged_here)
        self.read_nbytes += read_nbytes

    def _decode(self, shards: list[OpenShard]) -> None:
        if self._ring:
            self._decoder.stream(self._jobs(shards), self._ring)
            return
        digests, is_kept = self._decoder.decode(self._jobs(shards), lambda: self._renew(shards))
        stay = Stay.RESIDENT if is_kept else self._stay
        for shard, digest in zip(shards, digests, strict=True):
            name = shard.plan.segment
            part = self._part(shard)
            assert isinstance(part, Part)
            self._held[name] = part.publish(digest, stay)
            self._decoded.add(name)
            if stay is not Stay.PRIVATE:
                self._made.append(name)
        self._decoder.settle()

    def _jobs(self, shards: list[OpenShard]) -> list[Job]:
        return [shard.job(self._part(shard)) for shard in shards]

    def _renew(self, shards: list[OpenShard]) -> list[Job]:
        """Begin anew without the service, in other parts unless somebody looks at these.

        A worker of a service that was stopped has them, and may write to them when it goes on.
        """
        with self._showing:
            if not self._is_shown:
                for shard in shards:
                    part = self._part(shard)
                    assert isinstance(part, Part), "a ring's slots are lent to no service"
                    part.renew()
                self._make_parts(shards, is_charged_here=True)
        return self._jobs(shards)
