"""What fills the parts of one load: the service, workers of the load's own, or its own thread.

Guarantee: a service that goes away is done without, unless the settings require it.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence

from shmload._decoding.coordinator import Coordinator, Job
from shmload._decoding.ring import Ring
from shmload._loading.progress import Progress
from shmload._service.client import Service, find_service
from shmload._settings import settings
from shmload.errors import ServiceUnavailable

logger = logging.getLogger(__name__)


class Decoder:
    """Decodes for one load, until `close`.

    Args:
        keep: whether the load's segments shall be resident afterwards, whoever decodes them.
        workers: worker processes, where there is no service.
        progress: is told of bytes.
        service: what decodes; None for the running one, if the settings allow for it.
    """

    def __init__(
        self, *, keep: bool, workers: int, progress: Progress, service: Service | None
    ) -> None:
        self._keep = keep
        self._workers = workers
        self._progress = progress
        self._service = service
        self._coordinator: Coordinator | None = None
        self._is_cancelled = threading.Event()

    def find_service(self) -> None:
        """Connect to the running service, if there is one.

        Raises:
            ServiceError, ProtocolError: there is none to be used, and the settings require one.
        """
        if self._service is None:
            self._service = find_service()

    def leaves_to_service(self, read_nbytes: int) -> bool:
        """Tell whether a service decodes what takes so many bytes to read."""
        return self._service is not None and not _is_little(read_nbytes)

    def reserve(self, *, segment_nbytes: int, read_nbytes: int) -> None:
        """Have the service make room for segments that will stay.

        Args:
            segment_nbytes: their size.
            read_nbytes: what is read for them; a little is decoded here, and goes with the load.

        Raises:
            CapacityError: the service's budget does not allow for them.
        """
        stays = self._keep or not _is_little(read_nbytes)
        if self._service and segment_nbytes and stays:
            with self._without_service():
                self._service.reserve(segment_nbytes)

    def decode(
        self, jobs: Sequence[Job], renew: Callable[[], Sequence[Job]]
    ) -> tuple[list[str], bool]:
        """Fill all parts; blocks until that is done. One call at a time.

        Args:
            jobs: what to decode.
            renew: is called where a service went away in the middle; returns the same jobs, with
                parts that its workers do not have.

        Returns:
            The digest of each job's segment, and whether the segments are to stay: what a service
            has decoded does, within its budget.

        Raises:
            CheckpointError, CapacityError, WorkerError: as `Coordinator.decode`.
            DecodeCancelled: `cancel` was called.
        """
        read_nbytes = sum(job.read_nbytes for job in jobs)
        if self._service and self.leaves_to_service(read_nbytes):
            with self._without_service():
                return self._service.decode(
                    jobs, self._progress.add, self._is_cancelled.is_set
                ), True
            jobs = renew()
        workers = 0 if _is_little(read_nbytes) else self._workers
        if self._coordinator is None or self._coordinator.workers < workers:
            self._coordinator = Coordinator(workers)  # one without workers holds nothing
        digests = self._coordinator.decode(jobs, self._progress.add, lambda: self.is_cancelled)
        return digests, self._keep

    def stream(self, jobs: Sequence[Job], ring: Ring) -> None:
        """Decode into a ring's slots, with workers of the load's own; blocks until all is there.

        Raises:
            CheckpointError, WorkerError: as `Coordinator.decode`.
            DecodeCancelled: `cancel` was called.
        """
        self._coordinator = Coordinator(self._workers)
        self._coordinator.decode(jobs, self._progress.add, self._is_cancelled.is_set, ring)

    def note(self, found: Sequence[str], made: Sequence[str]) -> None:
        """Tell the service which segments were found and which were decoded."""
        if self._service:
            with self._without_service():
                self._service.note(found, made)

    def settle(self) -> None:
        """Have the service count what it has reserved as what is resident now."""
        self.note([], [])

    @property
    def is_cancelled(self) -> bool:
        """Whether the load was given up."""
        return self._is_cancelled.is_set()

    def cancel(self) -> None:
        """Have `decode` end soon; may be called from any thread."""
        self._is_cancelled.set()

    def close(self) -> None:
        """End the workers and the connection; again is fine."""
        with contextlib.ExitStack() as closing:
            if self._coordinator:
                closing.callback(self._coordinator.close)
            if self._service:
                closing.callback(self._service.close)

    @contextlib.contextmanager
    def _without_service(self) -> Iterator[None]:
        """Go on without the service where it goes away inside the block, unless it is required."""
        try:
            yield
        except ServiceUnavailable as exc:
            if settings().service == "require" or self.is_cancelled:
                raise
            logger.warning("%s; decoding without it", exc)
            if self._service:
                self._service.close()
            self._service = None


def _is_little(nbytes: int) -> bool:
    """Tell whether so many bytes are read quicker in the caller's thread than by workers."""
    return nbytes <= settings().inline_nbytes
