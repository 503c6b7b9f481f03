"""One call of `load_pipeline` or `load_model`: the ways for its weights, tried in turn.

    shared segments -> a ring -> segments -> segments without conversion

Each way names the errors by which a load finds out that it is closed; any other error ends the
call.
"""

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shmload._building.libraries import Said, said_here
from shmload._building.maker import Maker, NotToBeCast
from shmload._building.options import Options
from shmload._building.route import Route, choose_route
from shmload._checkpoints.left_out import hint_of_subfolders, hint_of_variants
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Checkpoint, Source
from shmload._decoding.ring import Ring
from shmload._devices.destination import BytesNeeded, Destination
from shmload._host.collector import forget_locals, freeze_imports, paused_gc
from shmload._host.descriptors import Inode
from shmload._host.procfs import mappings
from shmload._loading.load import Load
from shmload._loading.progress import Progress, Step
from shmload._loading.ranks import linger
from shmload._loading.sources import Rules
from shmload._segments.segment import Stay
from shmload._settings import local_world_size
from shmload._wording import logger_of
from shmload.errors import MemoryLimitExceeded, SharedMemoryFull, ShmloadError

logger = logger_of(__name__)


class Way(NamedTuple):
    """A way for the weights."""

    stay: Stay
    ring: Ring | None = None
    is_cast: bool = True
    """False: the segments get the stored dtypes."""
    gives_up_on: tuple[type[Exception], ...] = ()
    """Errors by which the way is closed, and the next one is tried."""
    closed: str = ""
    """What is said then."""
    level: int = logging.INFO


SHARED = Way(
    Stay.SHARED,
    gives_up_on=(MemoryLimitExceeded, SharedMemoryFull),
    closed="no room to share segments; each rank reads by itself",
    level=logging.WARNING,
)
RING = Way(
    Stay.PRIVATE,
    gives_up_on=(BytesNeeded,),
    closed="building reads weights on the host; no ring",
)


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What one call loads, and how."""

    source: Source
    maker: Maker
    dtype: object
    options: Options
    route: Route
    kwargs: dict[str, Any]
    """For `from_pretrained`."""
    progress: Progress
    said: Said
    """What the libraries have logged, which another build does not repeat."""
    inodes: set[Inode]
    """The inodes of all segments that were mapped for it."""

    def run(self) -> Any:
        """Load by the first way that is open, and return what was built."""
        before = sys.exception()
        try:
            ways = self._ways()
            way = next(ways)
            while True:
                try:
                    with way.ring or contextlib.nullcontext():
                        return self._go(way)
                except NotToBeCast:
                    after, reason = way._replace(is_cast=False), ""
                except way.gives_up_on as exc:
                    after, reason = None, str(exc)
                # Not in the blocks above: in them the exception keeps half-built models alive.
                if after is None:
                    self._note(way, reason)
                way = after or next(ways)
        except BaseException as exc:
            self._release(exc, before)
            raise

    def _ways(self) -> Iterator[Way]:
        if self.options.tries_to_share:
            yield SHARED if self.route.may_stream else SHARED._replace(gives_up_on=())
        destination = self.route.destination
        if destination and self.route.may_stream and (ring := destination.open_ring(self.source)):
            yield RING._replace(ring=ring)
        yield Way(self.options.stay)

    def _note(self, way: Way, reason: str) -> None:
        if way.ring and self.route.destination:
            self.route.destination.require_no_limit(self.source, reason)
        logger.log(way.level, "%s: %s", self.source.given, way.closed)

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

    def _go(self, way: Way) -> Any:
        """Begin a load by the likely rules, import its classes while it decodes, and build.

        To import them is most of a cold process's time. If they contradict those rules, or take
        other files, the load is discarded and begun again by the right ones.
        """
        steps = self.progress.steps
        is_cold = "diffusers" not in sys.modules
        expected = self.maker.foresee(self.source) or self.source
        rules = self._rules(expected, way, self.maker.likely_rule)
        begin = functools.partial(
            Load,
            stay=way.stay,
            progress=self.progress,
            workers=self.options.workers,
            ring=way.ring,
            may_link=self.options.may_link,
        )
        with contextlib.ExitStack() as loads:
            load = loads.enter_context(begin(expected, rules, parent_is_busy=is_cold))
            doing = "importing diffusers, transformers and torch" if is_cold else ""
            with steps.during(Step.IMPORTING, doing):
                taken = self.maker.import_classes(self.source)
                if is_cold:
                    freeze_imports()
            if self.route.destination:
                # Not at the top: it imports torch.
                from shmload._building.placing import require_fit

                require_fit(taken, self.maker, self.dtype, self.kwargs, self.route.destination)
            with steps.during(Step.DERIVING_RULES):
                certain = self._rules(taken, way, self.maker.rule)
            if (certain, _shards(taken)) != (rules, _shards(expected)):
                load.discard()
                if way.ring:
                    way.ring.reset()
                load = loads.enter_context(begin(taken, certain, parent_is_busy=False))
            made = self._build(taken, load, certain, way)
            # Shared segments stay until every rank on this host has attached them.
            if way.stay is Stay.SHARED and local_world_size() > 1:
                linger(load.holdings.segments())
            return made

    def _rules(
        self, source: Source, way: Way, choose: Callable[[Checkpoint, object], Rule]
    ) -> Rules:
        if not way.is_cast or self.route.is_bypassed:
            return dict.fromkeys(
                (each.component for each in source.checkpoints), self.maker.uncast_rule
            )
        return {each.component: choose(each, self.dtype) for each in source.checkpoints}

    def _build(self, source: Source, load: Load, rules: Rules, way: Way) -> Any:
        """Build it and copy it to its devices."""
        # Not at the top: importing torch takes a second, while workers already decode.
        from shmload._building.build import Build

        destination = self.route.destination
        place = None
        if destination:
            place = functools.partial(self._place, destination, load, way.ring)
        self.inodes.update(load.holdings.inodes())
        build = Build(
            *(source, self.maker, rules, load, self.dtype, self.kwargs, place, self.said),
        )
        with self.progress.steps.during(Step.BUILDING):
            return build.run(verify=self.options.verify, may_be_wrong=way.is_cast)

    def _place(self, destination: Destination, load: Load, ring: Ring | None, made: Any) -> None:
        # Not at the top: it imports torch.
        from shmload._building.placing import place_models, place_pipeline

        if self.maker.is_of_pipelines:
            place_pipeline(made, destination, load, ring)
        else:
            place_models({"": self.maker.part(made, "")}, destination, load, ring)


def load(
    source: Source,
    maker: Maker,
    dtype: object,
    options: Options,
    kwargs: dict[str, Any],
    *,
    title: str,
) -> Any:
    """Load a pipeline or a model; what `load_pipeline` and `load_model` have in common.

    Args:
        source: as it was found.
        maker: of the pipeline or model.
        dtype: as given, without `auto` where the library does not know it.
        options: how to load.
        kwargs: for `from_pretrained`; changed.
        title: what the bar and the log call it.
    """
    with whole_libraries(), paused_gc(), Progress(options.progress, title) as progress:
        # Where only the class knows which components it takes, the others are not decoded. With a
        # limit, devices are chosen by the modules of what is taken.
        if options.is_bounded or maker.foresee(source) is None:
            with progress.steps.during(Step.IMPORTING, "importing diffusers and transformers"):
                source = maker.import_classes(source)
        route = choose_route(source, maker, dtype, options, kwargs)
        attempt = Attempt(
            source=source,
            maker=maker,
            dtype=dtype,
            options=options,
            route=route,
            kwargs=kwargs,
            progress=progress,
            said=said_here(),
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
    logger.info("%s: loaded: %s", title, progress.steps.describe())
    return made


def _shards(source: Source) -> list[tuple[Path, ...]]:
    return [checkpoint.shards for checkpoint in source.checkpoints]
