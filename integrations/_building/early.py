"""Begins to decode before the libraries are imported, which is most of a cold process's time."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._checkpoints.rule import RAW, Rule
from shmload._decoding.ring import Ring
from shmload._host.collector import freeze_imports
from shmload._loading.load import Load
from shmload._loading.progress import Progress
from shmload._loading.sources import Rules
from shmload._loading.steps import Step
from shmload._segments.segment import Stay
from shmload.integrations._building.maker import Maker


@contextlib.contextmanager
def begin_early(
    source: Source,
    maker: Maker,
    dtype: object,
    *,
    stay: Stay,
    progress: Progress,
    workers: int | None = None,
    is_raw: bool = False,
    ring: Ring | None = None,
    may_link: bool = False,
    check: Callable[[Source], None] | None = None,
) -> Iterator[tuple[Load, Rules, Source]]:
    """Begin a load by the likely rules, and import its classes while it decodes.

    If the classes contradict those rules, or take other files, the load is discarded and begun
    again by the right ones.

    Args:
        source: a pipeline or a model.
        maker: of the pipeline or model.
        dtype: as given to `load_pipeline`.
        stay: as for `Load`.
        progress: as for `Load`.
        workers: as for `Load`.
        is_raw: leave every tensor in its stored dtype.
        ring: as for `Load`.
        may_link: as for `Load`.
        check: called when the classes are imported, with the source as they take it; if it raises,
            the load is discarded.

    Yields:
        The load, which ends with the context, its rules, and the source as the classes take it.
    """

    def begin(source: Source, rules: Rules, *, parent_is_busy: bool) -> Load:
        return Load(
            source,
            rules,
            stay=stay,
            progress=progress,
            parent_is_busy=parent_is_busy,
            workers=workers,
            ring=ring,
            may_link=may_link,
        )

    def choose(source: Source, choose_rule: Callable[[Checkpoint, object], Rule]) -> Rules:
        return {
            checkpoint.component: RAW if is_raw else choose_rule(checkpoint, dtype)
            for checkpoint in source.checkpoints
        }

    is_cold = "diffusers" not in sys.modules
    expected = maker.foresee(source) or source
    rules = choose(expected, maker.likely_rule)
    with contextlib.ExitStack() as loads:
        load = loads.enter_context(begin(expected, rules, parent_is_busy=is_cold))
        doing = "importing diffusers, transformers and torch" if is_cold else ""
        with progress.steps.during(Step.IMPORTING, doing):
            taken = maker.import_classes(source)
            if is_cold:
                freeze_imports()
        if check:
            check(taken)
        with progress.steps.during(Step.DERIVING_RULES):
            certain = choose(taken, maker.rule)
        if (certain, _shards(taken)) != (rules, _shards(expected)):
            load.discard()
            if ring:
                ring.reset()
            load = loads.enter_context(begin(taken, certain, parent_is_busy=False))
        yield load, certain, taken


def _shards(source: Source) -> list[tuple[Path, ...]]:
    return [checkpoint.shards for checkpoint in source.checkpoints]
