"""Decodes the weights of a download while the others come.

        download:  |-- text encoder --|-------- unet ---------|-- vae --|
        ahead:                        |- text encoder -|      |- unet ----|
        load:                                                             |- vae -|

The library downloads as ever, and knows nothing of this. The load that follows attaches what is
decoded. Whatever goes wrong here is left to it: it meets the same, and says what is wrong.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from shmload._checkpoints.hub_download import Follow
from shmload._checkpoints.incoming import Incoming
from shmload._checkpoints.resolve import Source
from shmload._host.background import Background
from shmload._loading.load import Load
from shmload._loading.progress import Progress
from shmload._loading.sources import Judge, Rules
from shmload._loading.steps import Step
from shmload._segments.listing import SegmentInfo
from shmload._segments.segment import Segment, Stay
from shmload._wording import logger_of

if TYPE_CHECKING:
    from pathlib import Path

logger = logger_of(__name__)

# How often it looks for new files, in seconds.
_POLL_S = 0.1


class Ahead:
    """What is decoded before a load; a context that keeps it until the load has it.

    It owns the segments. If the context ends by an error they are removed.

    Args:
        stay: how long the load's segments stay; None to decode nothing ahead.
        workers: number of worker processes; None for the number in the settings.
        may_link: as for `Holdings`.
    """

    def __init__(
        self, stay: Stay | None, *, workers: int | None = None, may_link: bool = False
    ) -> None:
        self._stay = stay
        self._workers = workers
        self._may_link = may_link
        self._progress = Progress(False, "")
        self._loads: list[Load] = []
        self._begun: set[Path] = set()
        self._is_over = threading.Event()
        self._is_given_up = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as ending:  # all, even if one raises
            while self._loads:
                load = self._loads.pop()
                ending.callback(load.close if exc is None else load.discard)

    def follow(self, judge: Judge) -> Follow | None:
        """Return what decodes beside a download; None if nothing is to be decoded ahead."""
        return None if self._stay is None else functools.partial(self._follow, self._stay, judge)

    def lend(self, name: str) -> Segment | None:
        """Return a lease on a segment that was decoded, the caller's; None if it was not."""
        for load in self._loads:
            for segment in load.holdings.segments():
                if segment.name == name:
                    return segment.lend()
        return None

    @property
    def read_nbytes(self) -> int:
        """Bytes of weights that were read."""
        return sum(load.read_nbytes for load in self._loads)

    @property
    def evicted(self) -> list[SegmentInfo]:
        """The segments that were evicted to make room."""
        return [info for load in self._loads for info in load.evicted]

    def elapsed_s(self, step: Step) -> float:
        """Return the time in a step, in seconds; most of it passed during the download."""
        return self._progress.steps.elapsed_s(step)

    @contextlib.contextmanager
    def _follow(self, stay: Stay, judge: Judge, incoming: Incoming) -> Iterator[None]:
        """Decode what comes, in a thread, until the block ends; then finish what is begun."""
        work = Background(functools.partial(self._run, stay, judge, incoming), "shmload-ahead")
        try:
            work.start()
            yield
            self._is_over.set()
            work.join()
        except BaseException:  # also Ctrl-C while it finishes
            self._is_given_up.set()
            raise
        finally:
            self._is_over.set()
            work.join_undisturbed()

    def _run(self, stay: Stay, judge: Judge, incoming: Incoming) -> None:
        seen = None
        try:
            while not self._is_over.wait(_POLL_S):
                there = incoming.there()
                if there == seen or not incoming.has_begun(there):
                    continue
                seen = there
                if found := self._without_begun(incoming.source()):
                    self._decode(stay, *judge(found))
        except Exception as exc:
            logger.info("%s: no more is decoded ahead: %s", incoming.wanted.source, exc)

    def _without_begun(self, source: Source | None) -> Source | None:
        """Leave out the shards that were seen before; return None if there are no others."""
        checkpoints = []
        for each in source.checkpoints if source else ():
            shards = tuple(shard for shard in each.shards if shard not in self._begun)
            if shards:
                checkpoints.append(msgspec.structs.replace(each, shards=shards))
        if source is None or not checkpoints:
            return None
        self._begun.update(shard for each in checkpoints for shard in each.shards)
        return msgspec.structs.replace(source, checkpoints=tuple(checkpoints))

    def _decode(self, stay: Stay, source: Source, rules: Rules) -> None:
        if self._is_over.is_set() or not source.checkpoints:
            return  # from now on the load itself is quicker: it need not wait for this one
        load = Load(
            source,
            rules,
            stay=stay,
            progress=self._progress,
            parent_is_busy=True,
            workers=self._workers,
            may_link=self._may_link,
            given_up=self._is_given_up,
        )
        try:
            load.wait()
        except BaseException:  # at once: the load would wait for its parts
            load.discard()
            raise
        self._loads.append(load)
        load.leave_service()
        shards = ", ".join(os.path.relpath(plan.path, source.root) for plan in load.holdings.plans)
        logger.info("%s: decoded while the rest is downloaded: %s", source.given, shards)
