"""A load that is complete before its caller uses it."""

import contextlib
from collections.abc import Iterator, Mapping

from shmload._checkpoints.resolve import Source
from shmload._checkpoints.rule import Rule
from shmload._host.collector import paused_gc
from shmload._loading.load import Load
from shmload._loading.progress import Progress
from shmload._segments.segment import Stay


@contextlib.contextmanager
def complete_load(
    source: Source,
    rules: Mapping[str, Rule],
    *,
    stay: Stay,
    workers: int | None,
    verify: bool,
    progress: Progress,
) -> Iterator[Load]:
    """Load and wait until every segment is complete; a context that ends the load.

    Args:
        source: as for `Load`.
        rules: as for `Load`.
        stay: as for `Load`.
        workers: as for `Load`.
        verify: recompute the digest of every segment.
        progress: shows the load's progress; stays the caller's.

    Yields:
        The load, with every segment complete.

    Raises:
        CheckpointError, CapacityError, WorkerError, SegmentError.
    """
    with contextlib.ExitStack() as ending:
        with paused_gc():  # not in the caller's block
            load = ending.enter_context(
                Load(
                    source,
                    rules,
                    stay=stay,
                    progress=progress,
                    parent_is_busy=False,
                    workers=workers,
                )
            )
            load.wait()
            if verify:
                load.verify()
        yield load
