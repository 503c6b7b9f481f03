"""Begins to decode before the libraries are imported, which is most of a cold process's time."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._checkpoints.rule import RAW, Rule
from shmload._checkpoints.rules import likely_rule, rule_for
from shmload._decoding.ring import Ring
from shmload._host.collector import freeze_imports
from shmload._loading.load import Load
from shmload._loading.progress import Progress
from shmload._loading.sources import Rules
from shmload._loading.steps import Step
from shmload._segments.segment import Stay


@contextlib.contextmanager
def begin_early(
    source: Source,
    dtype: object,
    *,
    stay: Stay,
    progress: Progress,
    workers: int | None = None,
    is_raw: bool = False,
    ring: Ring | None = None,
) -> Iterator[tuple[Load, Rules]]:
    """Begin a load by the likely rules, and import the pipeline's classes while it decodes.

    If the classes contradict those rules, the load is discarded and begun again by the right ones.

    Args:
        source: a pipeline.
        dtype: as given to `load_pipeline`.
        stay: as for `Load`.
        progress: as for `Load`.
        workers: as for `Load`.
        is_raw: leave every tensor in its stored dtype.
        ring: as for `Load`.

    Yields:
        The load, which ends with the context, and its rules.
    """

    def begin(rules: Rules, *, parent_is_busy: bool) -> Load:
        return Load(
            source,
            rules,
            stay=stay,
            progress=progress,
            parent_is_busy=parent_is_busy,
            workers=workers,
            ring=ring,
        )

    def choose(choose_rule: Callable[[Checkpoint, object], Rule]) -> Rules:
        return {
            checkpoint.component: RAW if is_raw else choose_rule(checkpoint, dtype)
            for checkpoint in source.checkpoints
        }

    is_cold = "diffusers" not in sys.modules
    rules = choose(likely_rule)
    with contextlib.ExitStack() as loads:
        load = loads.enter_context(begin(rules, parent_is_busy=is_cold))
        doing = "importing diffusers, transformers and torch" if is_cold else ""
        with progress.steps.during(Step.IMPORTING, doing):
            _import_classes(source)
            if is_cold:
                freeze_imports()
        with progress.steps.during(Step.DERIVING_RULES):
            certain = choose(rule_for)
        if certain != rules:
            load.discard()
            if ring:
                ring.reset()
            load = loads.enter_context(begin(certain, parent_is_busy=False))
        yield load, certain


def _import_classes(source: Source) -> None:
    """Import the classes that the pipeline is made of, and the module that builds it."""
    import diffusers
    import transformers

    import shmload.integrations._building.build  # noqa: F401 with it, torch

    # Warnings from this import are not about these models.
    getattr(diffusers, source.class_name or "DiffusionPipeline", None)
    libraries = {"diffusers": diffusers, "transformers": transformers}
    for checkpoint in source.checkpoints:
        if checkpoint.library in libraries:
            getattr(libraries[checkpoint.library], checkpoint.class_name, None)
