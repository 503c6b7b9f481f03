"""A load that is over before anything is done with it."""

import contextlib
from collections.abc import Iterator, Mapping

from shmload._checkpoints.resolve import Source
from shmload._checkpoints.rules import Rule
from shmload._host.collector import paused_gc
from shmload._loading.load import Load
from shmload._loading.progress import Callback, Progress
from shmload._segments.segment import Stay
from shmload._service.client import Service


@contextlib.contextmanager
def complete_load(
    source: Source,
    rules: Mapping[str, Rule],
    *,
    stay: Stay,
    workers: int | None,
    verify: bool,
    progress: Callback | bool | None,
    service: Service | None = None,
) -> Iterator[Load]:
    """Do a whole load; a context that ends it.

    Args:
        source: as for `Load`, like `rules`, `stay` and `workers`.
        rules: see there.
        stay: see there.
        workers: see there.
        verify: whether to recompute the digest of every segment.
        progress: as for `Progress`.
        service: as for `Load`.

    Yields:
        The load, with every segment complete.

    Raises:
        CheckpointError, CapacityError, WorkerError, SegmentError.
    """
    with contextlib.ExitStack() as ending:
        with paused_gc():  # not in the caller's block
            counter = ending.enter_context(Progress(progress, source.root.name))
            load = ending.enter_context(
                Load(
                    source,
                    rules,
                    stay=stay,
                    progress=counter,
                    parent_is_busy=False,
                    workers=workers,
                    service=service,
                )
            )
            load.wait()
            if verify:
                load.verify()
        yield load
