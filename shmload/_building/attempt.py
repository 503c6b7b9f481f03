"""One call of `load_pipeline` or `load_model`: the ways for its weights, tried in turn.

    shared segments -> private ones, of which the host may hold only a part at a time

Each way names the errors by which a load finds out that it is closed; any other error ends the
call.
"""

import contextlib
import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from shmload._building.maker import Maker
from shmload._building.options import BYPASSING_KEYWORDS, QUANTISING_KEYWORDS, Options
from shmload._checkpoints.library import whole_libraries
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.source import Checkpoint, Source, find_left_out
from shmload._decoding.allowance import Bound
from shmload._devices.destination import Destination
from shmload._host.collector import forget_locals, freezing_imports
from shmload._loading.holdings import linger
from shmload._loading.load import Load
from shmload._loading.progress import Progress
from shmload._loading.sources import Rules
from shmload._loading.trace import Phase
from shmload._placement.device_map import STRATEGIES
from shmload._placement.placement import place
from shmload._segments.segment import Stay
from shmload._settings import local_world_size
from shmload._wording import logger_of
from shmload.errors import ArgumentError, MemoryLimitExceeded, SharedMemoryFull, ShmloadError

logger = logger_of(__name__)


class Way(NamedTuple):
    """A way for the weights."""

    stay: Stay
    bound: Bound | None = None
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


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """What one call loads, and how."""

    source: Source
    maker: Maker
    dtype: object
    options: Options
    kwargs: dict[str, Any]
    """For `from_pretrained`."""
    destination: Destination | None
    """Devices that shmload copies weights to; None if they stay on the host, or if the library
    copies them."""
    is_bypassed: bool
    """The library reads other files, or makes new tensors: segments keep the stored dtypes."""
    may_stream: bool
    """The host may hold only a part of the weights at a time: nothing has to stay there."""
    progress: Progress

    def run(self) -> Any:
        """Load by the first way that is open, and return what was built."""
        before = sys.exception()
        try:
            ways = self._ways()
            while True:
                way = next(ways)
                try:
                    return self._go(way)
                except way.gives_up_on:
                    pass
                # Not in the block above: in it the exception keeps half-built models alive.
                logger.log(way.level, "%s: %s", self.source.given, way.closed)
        except BaseException as exc:
            # The frames of the traceback keep models alive, and models refer to themselves.
            forget_locals(exc, before)
            gc.collect()
            raise

    def _ways(self) -> Iterator[Way]:
        if self.options.tries_to_share:
            yield SHARED if self.may_stream else SHARED._replace(gives_up_on=())
        destination = self.destination if self.may_stream else None
        bound = destination.bound(self.source, self.options.workers) if destination else None
        yield Way(self.options.stay, bound)

    def _go(self, way: Way, *, is_cast: bool = True) -> Any:
        """Load by a way; once more without conversion if the segments have the wrong dtypes.

        Args:
            way: for the weights.
            is_cast: False if the segments get the stored dtypes.
        """
        with contextlib.ExitStack() as loads:
            taken, rules, load = self._begin(loads, way, is_cast=is_cast)
            # Not at the top: importing torch takes a second, while workers already decode.
            import torch

            from shmload._building.build import Build

            state = torch.get_rng_state()
            build = Build(taken, self.maker, rules, load, self.dtype, self.kwargs)
            try:
                with self.progress.during(Phase.BUILD):
                    made = build.run()
                    if not (is_cast and build.was_cast_wrongly(made)):
                        build.finish(made, self._place_by(load, way), verify=self.options.verify)
                        # Shared segments stay until every rank on this host has attached them.
                        if way.stay is Stay.SHARED and local_world_size() > 1:
                            linger(load.holdings.segments())
                        return made
            except way.gives_up_on:
                # The libraries draw missing weights at random: the next build draws the same ones.
                torch.set_rng_state(state)
                raise
            del made
            load.discard()
        torch.set_rng_state(state)
        return self._go(way, is_cast=False)

    def _begin(
        self, loads: contextlib.ExitStack, way: Way, *, is_cast: bool
    ) -> tuple[Source, Rules, Load]:
        """Begin a load by the likely rules, and import its classes while it decodes.

        To import them is most of a cold process's time. If they contradict those rules, or take
        other files, the load is discarded and begun again by the right ones.

        Args:
            loads: ends the loads.
            way: for the weights.
            is_cast: as for `_go`.

        Returns:
            The source as the classes take it, the rule of each component, and the load.
        """
        is_cold = "diffusers" not in sys.modules
        rules = self._rules(self.source, self.maker.likely_rule, is_cast=is_cast)
        begin = functools.partial(
            Load,
            stay=way.stay,
            progress=self.progress,
            workers=self.options.workers,
            bound=way.bound,
            may_link=self.options.may_link,
        )
        load = loads.enter_context(begin(self.source, rules, parent_is_busy=is_cold))
        doing = "importing diffusers, transformers and torch" if is_cold else ""
        with self.progress.during(Phase.IMPORT, doing), freezing_imports():
            taken = self.maker.import_classes(self.source)
            import shmload._building.build  # noqa: F401 for the build
        if self.destination:
            # Not at the top: it imports torch.
            from shmload._building.placing import require_fit

            require_fit(taken, self.maker, self.dtype, self.kwargs, self.destination)
        with self.progress.during(Phase.PLAN):
            certain = self._rules(taken, self.maker.rule, is_cast=is_cast)
        if certain != rules:
            load.discard()
            load = loads.enter_context(begin(taken, certain, parent_is_busy=False))
        return taken, certain, load

    def _rules(
        self, source: Source, choose: Callable[[Checkpoint, object], Rule], *, is_cast: bool
    ) -> Rules:
        if not is_cast or self.is_bypassed:
            return {each.component: self.maker.uncast_rule for each in source.checkpoints}
        return {each.component: choose(each, self.dtype) for each in source.checkpoints}

    def _place_by(self, load: Load, way: Way) -> Callable[[Any], object] | None:
        """Return what copies what was built to its devices; None if it stays on the host."""
        destination = self.destination
        if destination is None:
            return None
        # Not at the top: it imports torch.
        from shmload._building.placing import place_models, place_pipeline

        if self.maker.is_of_pipelines:
            return lambda made: place_pipeline(made, destination, load)
        return lambda made: place_models({"": self.maker.component(made, "")}, destination, load)


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
    with whole_libraries(), Progress(options.progress, title) as progress:
        if options.is_bounded:  # devices are chosen by the modules of what the class takes
            with progress.during(Phase.IMPORT, "importing diffusers and transformers"):
                source = maker.import_classes(source)
        destination = _parse_destination(source, options, kwargs)
        # With False the library reads its own files.
        reads_others = kwargs.get("use_safetensors") is False
        is_bypassed = reads_others or any(map(kwargs.get, BYPASSING_KEYWORDS))
        keeps_nothing = options.stay is Stay.PRIVATE and not (options.verify or is_bypassed)
        if options.is_bounded:
            destination = _bound(destination if keeps_nothing else None, source, dtype)
        attempt = Attempt(
            source=source,
            maker=maker,
            dtype=dtype,
            options=options,
            kwargs=kwargs,
            progress=progress,
            destination=destination,
            # The rule of a maker that keeps blocks knows what stays as it is.
            is_bypassed=is_bypassed and not maker.keeps_blocks,
            may_stream=keeps_nothing and destination is not None,
        )
        try:
            made = attempt.run()
        except (OSError, ValueError) as exc:  # a library says only that it found no file
            there = ", ".join(map(str, find_left_out(source)))
            if there and not isinstance(exc, ShmloadError):
                exc.add_note(f"shmload: there is {there}; a variant is asked for by variant=")
            raise
    return made


def _parse_destination(
    source: Source, options: Options, kwargs: dict[str, Any]
) -> Destination | None:
    """Return where the weights go; None if they stay, or if the library copies them.

    Raises:
        ArgumentError: as `require_readable`.
    """
    if options.device_map is None:
        return None
    if _is_quantised(source, kwargs):
        # Weights are quantised on the device that they go to, and only the library can move them.
        kwargs["device_map"] = options.device_map
        if options.max_memory is not None:
            kwargs["max_memory"] = options.max_memory
        return None
    kwargs.pop("offload_folder", None)  # nothing waits there
    return options.destination(source.components)


def _is_quantised(source: Source, kwargs: Mapping[str, Any]) -> bool:
    """Tell whether the library quantises weights, or loads some that are quantised."""
    return any(map(kwargs.get, QUANTISING_KEYWORDS)) or any(
        checkpoint.config.get("quantization_config")
        for checkpoint in source.checkpoints
        if checkpoint.component not in kwargs
    )


def _bound(destination: Destination | None, source: Source, dtype: object) -> Destination:
    """Check that no weight has to stay on the host, and let a strategy decide now.

    Raises:
        ArgumentError: an argument keeps weights on the host.
        DoesNotFit: as `place`.
    """
    if destination is None:
        raise ArgumentError(
            "max_host_memory is for loads that keep nothing on the host: give a device_map, and "
            "neither keep, share, verify, quantised weights nor other files than safetensors"
        )
    if destination.device_map not in STRATEGIES:
        return destination
    from shmload._building.module_trees import components_of

    placement = place(components_of(source, dtype), destination.device_map, destination.inventory())
    # The default is for models without a checkpoint, such as models that the caller passes.
    first = next(iter(placement.execution_devices.values()))
    decided = {"": first} | placement.device_map
    return msgspec.structs.replace(destination, device_map=decided)
