"""One call of `load_pipeline` or `load_model`: the ways to decode and build, tried in turn."""

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from shmload._building.fit import Fit
from shmload._building.maker import Maker, NotToBeCast
from shmload._building.route import (
    Asked,
    Route,
    choose_route,
)
from shmload._checkpoints.left_out import hint_of_subfolders, hint_of_variants
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._checkpoints.rule import RAW, Rule
from shmload._decoding.ring import Ring
from shmload._devices.destination import Destination
from shmload._devices.hollow import BytesNeeded
from shmload._host.collector import forget_locals, freeze_imports, paused_gc
from shmload._host.descriptors import Inode
from shmload._host.procfs import mappings
from shmload._loading.load import Load
from shmload._loading.progress import Callback, Progress
from shmload._loading.sources import Rules
from shmload._loading.steps import Step
from shmload._segments.segment import Segment, Stay
from shmload._settings import local_world_size
from shmload._wording import logger_of
from shmload.errors import MemoryLimitExceeded, SharedMemoryFull, ShmloadError

logger = logger_of(__name__)
Place = Callable[[Any, Destination, Load, Ring | None], None]
"""Copies what was built to its devices."""
Linger = Callable[[Iterable[Segment]], None]
"""Keeps shared segments until all ranks of this host have attached them."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What one call loads, and how."""

    source: Source
    maker: Maker
    dtype: object
    asked: Asked
    route: Route
    fit: Fit | None
    """Of its destination; None if it has none."""
    kwargs: dict[str, Any]
    """For `from_pretrained`."""
    workers: int | None
    progress: Progress
    place: Place
    linger: Linger
    inodes: set[Inode]
    """The inodes of all segments that were mapped for it."""

    def run(self) -> Any:
        """Load by the best way that is possible, and return what was built."""
        before = sys.exception()
        try:
            if self.asked.tries_to_share and (made := self._by_shared_segments()) is not None:
                return made
            ring = self.route.open_ring(self.source)
            if ring and (made := self._by_ring(ring)) is not None:
                return made
            return self._by_segments(self.asked.stay)
        except BaseException as exc:
            self._release(exc, before)
            raise

    def _release(self, error: BaseException, before: BaseException | None) -> None:
        """Let go of all that was built, after an error: nothing stays mapped.

        Args:
            error: the error.
            before: as for `forget_locals`.
        """
        # Modules live on in the locals of the functions that the error passed through.
        forget_locals(error, before)
        # Hooks and modules refer to each other. To collect takes some tenths of a second.
        if mappings(self.inodes):
            gc.collect()

    def _by_segments(self, stay: Stay) -> Any:
        """Load by segments; by ones with the stored dtypes if a cast turns out to be wrong."""
        with contextlib.suppress(NotToBeCast):
            return self._by_segments_once(stay)
        raw = msgspec.structs.replace(self.route, is_bypassed=True)
        return msgspec.structs.replace(self, route=raw)._by_segments_once(stay)

    def _by_segments_once(self, stay: Stay) -> Any:
        """Load by segments; shared ones stay until every rank on this host has attached them."""
        with self._begin(stay) as (load, rules, source):
            made = self._build(source, load, rules)
            if stay is Stay.SHARED and local_world_size() > 1:
                self.linger(load.holdings.segments())
        return made

    def _by_shared_segments(self) -> Any:
        """Load by shared segments. If there is no room and a ring is possible, return None."""
        try:
            return self._by_segments(Stay.SHARED)
        except (MemoryLimitExceeded, SharedMemoryFull):
            if not self.route.may_stream:
                raise
        logger.warning(
            "%s: no room to share segments; each rank reads by itself",
            self.source.given,
        )
        return None

    def _by_ring(self, ring: Ring) -> Any:
        """Load by a ring and close it; return None if building reads weights on the host."""
        try:
            with ring, self._begin(Stay.PRIVATE, ring) as (load, rules, source):
                return self._build(source, load, rules, ring)
        except BytesNeeded as exc:
            reason = str(exc)
        # Not in the block above: in it the exception keeps the half-built models alive.
        if self.route.destination:
            self.route.destination.require_no_limit(self.source, reason)
        logger.info("%s: building reads weights on the host; no ring", self.source.given)
        return None

    @contextlib.contextmanager
    def _begin(self, stay: Stay, ring: Ring | None = None) -> Iterator[tuple[Load, Rules, Source]]:
        """Begin a load by the likely rules, and import its classes while it decodes.

        To import them is most of a cold process's time. If they contradict those rules, or take
        other files, the load is discarded and begun again by the right ones.

        Yields:
            The load, which ends with the context, its rules, and the source as the classes take it.
        """
        steps = self.progress.steps
        is_cold = "diffusers" not in sys.modules
        expected = self.maker.foresee(self.source) or self.source
        rules = self._rules(expected, self.maker.likely_rule)
        with contextlib.ExitStack() as loads:
            load = loads.enter_context(
                self._open(expected, rules, stay, ring, parent_is_busy=is_cold)
            )
            doing = "importing diffusers, transformers and torch" if is_cold else ""
            with steps.during(Step.IMPORTING, doing):
                taken = self.maker.import_classes(self.source)
                if is_cold:
                    freeze_imports()
            if self.fit:
                self.fit.require(taken)
            with steps.during(Step.DERIVING_RULES):
                certain = self._rules(taken, self.maker.rule)
            if (certain, _shards(taken)) != (rules, _shards(expected)):
                load.discard()
                if ring:
                    ring.reset()
                load = loads.enter_context(
                    self._open(taken, certain, stay, ring, parent_is_busy=False)
                )
            yield load, certain, taken

    def _rules(self, source: Source, choose: Callable[[Checkpoint, object], Rule]) -> Rules:
        return {
            checkpoint.component: RAW if self.route.is_bypassed else choose(checkpoint, self.dtype)
            for checkpoint in source.checkpoints
        }

    def _open(
        self, source: Source, rules: Rules, stay: Stay, ring: Ring | None, *, parent_is_busy: bool
    ) -> Load:
        return Load(
            source,
            rules,
            stay=stay,
            progress=self.progress,
            parent_is_busy=parent_is_busy,
            workers=self.workers,
            ring=ring,
            may_link=self.asked.may_link,
        )

    def _build(self, source: Source, load: Load, rules: Rules, ring: Ring | None = None) -> Any:
        """Build it and copy it to its devices."""
        # Not at the top: importing torch takes a second, while workers already decode.
        from shmload._building.build import Build

        destination = self.route.destination
        place = None
        if destination:
            place = functools.partial(self._place, destination, load, ring)
        self.inodes.update(load.holdings.inodes())
        build = Build(source, self.maker, rules, load, self.dtype, self.kwargs, place)
        with self.progress.steps.during(Step.BUILDING):
            return build.run(verify=self.asked.verify)

    def _place(self, destination: Destination, load: Load, ring: Ring | None, made: Any) -> None:
        self.place(made, destination, load, ring)


def load(
    source: Source,
    maker: Maker,
    dtype: object,
    asked: Asked,
    kwargs: dict[str, Any],
    *,
    title: str,
    workers: int | None,
    progress: Callback | bool | None,
    place: Place,
    linger: Linger,
) -> Any:
    """Load a pipeline or a model; what `load_pipeline` and `load_model` have in common.

    Args:
        source: as it was found.
        maker: of the pipeline or model.
        dtype: as given, without `auto` where the library does not know it.
        asked: the arguments about memory and devices.
        kwargs: for `from_pretrained`; changed.
        title: what the bar and the log call it.
        workers: as given.
        progress: as given.
        place: copies what was built to its devices.
        linger: keeps shared segments for other ranks.
    """
    with whole_libraries(), paused_gc(), Progress(progress, title) as counter:
        # Where only the class knows which components it takes, the others are not decoded. With a
        # limit, devices are chosen by the modules of what is taken.
        if asked.is_bounded or maker.foresee(source) is None:
            with counter.steps.during(Step.IMPORTING, "importing diffusers and transformers"):
                source = maker.import_classes(source)
        route = choose_route(source, dtype, asked, kwargs)
        if maker.keeps_blocks:  # its rule knows what stays as it is
            route = msgspec.structs.replace(route, is_bypassed=False)
        fit = None
        if route.destination:
            route.destination.require_present()
            fit = Fit(source, maker, dtype, kwargs, route.destination)
            fit.require_early(counter.steps)
        attempt = Attempt(
            source=source,
            maker=maker,
            dtype=dtype,
            asked=asked,
            route=route,
            fit=fit,
            kwargs=kwargs,
            workers=workers,
            progress=counter,
            place=place,
            linger=linger,
            inodes=set(),
        )
        try:
            made = attempt.run()
        except (OSError, ValueError) as exc:  # a library says only that it found no file
            subfolder = kwargs.get("subfolder")
            hint = hint_of_subfolders(source, subfolder) or hint_of_variants(source, subfolder)
            if hint and not isinstance(exc, ShmloadError):
                exc.add_note(f"shmload: {hint}")
            raise
    logger.info("%s: loaded: %s", title, counter.steps.describe())
    return made


def _shards(source: Source) -> list[tuple[Path, ...]]:
    return [checkpoint.shards for checkpoint in source.checkpoints]
