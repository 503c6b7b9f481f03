"""Fills the parts of one load: by the service, by worker processes, or in the load's thread.

Guarantee: if the service goes away, the load goes on without it, unless the settings require it.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from shmload._checkpoints.source import Source
from shmload._decoding.coordinator import Coordinator
from shmload._decoding.job import Job, OnPiece
from shmload._decoding.ring import Ring
from shmload._loading.progress import Progress
from shmload._loading.room import WaitForRoom
from shmload._segments.listing import SegmentInfo, segments_by_lock
from shmload._segments.metadata import source_text
from shmload._segments.roots import Root, find_roots
from shmload._service.client import Client, find_service
from shmload._settings import settings
from shmload._wording import logger_of
from shmload.errors import ServiceUnavailable

logger = logger_of(__name__)


class Decoder:
    """Decodes for one load, until `close` and `leave_service`.

    Args:
        source: what is loaded.
        keep: the load's segments will be resident.
        workers: number of worker processes if no service decodes.
        progress: counts the bytes.
    """

    def __init__(
        self,
        *,
        source: Source,
        keep: bool,
        workers: int,
        progress: Progress,
    ) -> None:
        self._source = source
        self._keep = keep
        self._workers = workers
        self._progress = progress
        self._service: Client | None = None
        self._coordinator: Coordinator | None = None
        self.cancelled = threading.Event()
        """Set when the load was given up: `decode` ends soon."""

    @functools.cached_property
    def _model(self) -> Root:
        """What is loaded, by which the service counts: as the listings name it."""
        source = self._source
        paths = [source_text(os.path.abspath(path)) for path in source.shards or [source.root]]
        roots = find_roots(paths)
        # Components that lack the variant have plain files.
        of_variant = (root for root in roots.values() if root.variant == (source.variant or ""))
        return next(of_variant, roots[paths[0]])

    def find_service(self) -> None:
        """Connect to the running service, if there is one.

        Raises:
            ServiceError, ProtocolError: no service is usable, and the settings require one.
        """
        self._service = find_service()

    @property
    def has_service(self) -> bool:
        """Whether the load is connected to a service."""
        return self._service is not None

    def leaves_to_service(self, read_nbytes: int) -> bool:
        """Tell whether the service decodes shards of this size."""
        return self._service is not None and not _is_little(read_nbytes)

    def reserve(self, *, segment_nbytes: int, read_nbytes: int) -> list[SegmentInfo]:
        """Reserve room for segments that will stay in the service's budget.

        Args:
            segment_nbytes: size of the segments.
            read_nbytes: size of their shards. Small ones are decoded here; unless the load keeps
                its segments, these take nothing from the budget.

        It waits while loads that run may give room back.

        Returns:
            The segments that the service has evicted for them.

        Raises:
            CapacityError: the budget has no room for them.
        """
        stays = self._keep or not _is_little(read_nbytes)
        if self._service and segment_nbytes and stays:
            with self._without_service():
                wait = WaitForRoom(segment_nbytes, "the service's budget")
                before = segments_by_lock()  # what went has no header left to read
                gone = self._service.reserve(
                    self._model, segment_nbytes, wait, self.cancelled.is_set
                )
                return [info for info in before if info.name in gone]
        return []

    def decode(
        self,
        jobs: Sequence[Job],
        renew: Callable[[], Sequence[Job]],
        on_piece: OnPiece,
        ring: Ring | None = None,
    ) -> tuple[list[str], bool]:
        """Fill all parts, or the slots of a ring; blocks until that is done. One call at a time.

        Args:
            jobs: what to decode.
            renew: called if the service goes away in the middle; returns the same jobs with parts
                that the service's workers do not have.
            on_piece: called with each piece that is complete; a service tells of none.
            ring: if given, its slots are filled by worker processes, as for `Coordinator.decode`.

        Returns:
            The digest of each job's segment, and whether the segments become resident: those that
            a service decodes do, within its budget.

        Raises:
            CheckpointError, CapacityError, WorkerError: as `Coordinator.decode`.
            DecodeCancelled: `cancelled` was set.
        """
        read_nbytes = sum(job.read_nbytes for job in jobs)
        if self._service and self.leaves_to_service(read_nbytes):
            with self._without_service():
                return self._service.decode(
                    self._model, jobs, self._progress.add, self.cancelled.is_set
                ), True
            jobs = renew()
        workers = 0 if _is_little(read_nbytes) and not ring else self._workers
        if self._coordinator is None or self._coordinator.workers < workers:
            self._coordinator = Coordinator(workers)  # an earlier one had no workers to end
        digests = self._coordinator.decode(
            jobs, self._progress.add, self.cancelled.is_set, ring, on_piece=on_piece
        )
        return digests, self._keep

    def note(self, found: Sequence[str], made: Sequence[str]) -> None:
        """Tell the service the names of the segments that were attached and decoded."""
        if self._service:
            with self._without_service():
                self._service.note(self._model, found, made)

    def settle(self) -> None:
        """Tell the service that the segments it reserved room for are resident now."""
        if self._service:
            with self._without_service():
                self._service.settle()

    def close(self) -> None:
        """End the workers; a second call does nothing. `leave_service` ends the connection."""
        if self._coordinator:
            self._coordinator.close()

    def leave_service(self) -> None:
        """End the connection; a second call does nothing."""
        service, self._service = self._service, None
        if service:
            service.close()

    @contextlib.contextmanager
    def _without_service(self) -> Iterator[None]:
        """If the service goes away inside the block, go on without it unless it is required."""
        try:
            yield
        except ServiceUnavailable as exc:
            if settings().service == "require" or self.cancelled.is_set():
                raise
            logger.warning("%s; decoding without it", exc)
            if self._service:
                self._service.close()
            self._service = None


def _is_little(nbytes: int) -> bool:
    """Tell whether the load's own thread decodes this many bytes faster than workers."""
    return nbytes <= settings().inline_nbytes
