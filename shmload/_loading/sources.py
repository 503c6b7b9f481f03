"""The loads of `warm`, `view` and others, which are complete before their caller uses them.

First the source is found, and its dtype rules are derived.
"""

import contextlib
from collections.abc import Iterator, Mapping

import msgspec

from shmload._checkpoints.formats.known import variant_of
from shmload._checkpoints.library import library, whole_libraries
from shmload._checkpoints.modular import find_whole_source
from shmload._checkpoints.rule import Rule, known_rule, rule_for, settle_dtype
from shmload._checkpoints.source import Source, why_none_is_read
from shmload._checkpoints.wanted import Wanted
from shmload._host.collector import paused_gc
from shmload._loading.load import Load
from shmload._loading.progress import Progress
from shmload._loading.trace import Phase, during
from shmload._segments.segment import Stay
from shmload.errors import ArgumentError, SourceNotFound

Rules = dict[str, Rule]
"""The rule of each component's checkpoint."""


def find_with_rules(
    wanted: Wanted,
    progress: Progress,
    *,
    may_be_unread: bool = False,
    pipeline_class: object = None,
) -> tuple[Source, Rules]:
    """Find a source and derive its rules.

    Args:
        wanted: the source.
        progress: counts the time of imports and of rules.
        may_be_unread: as for `find_certain`.
        pipeline_class: only the components that it takes; None for all.

    Raises:
        SourceNotFound: as `find_certain`.
        ArgumentError: the class loads no pipelines, or the source is none.
        UnknownComponent, UnknownDtype, CheckpointError.
    """
    with during(Phase.FIND):
        found = find_certain(wanted, may_be_unread=may_be_unread)
    if pipeline_class is not None:
        if not found.is_pipeline:
            raise ArgumentError(f"pipeline_class is for pipelines, and {wanted.source} is none")
        with progress.during(Phase.IMPORT, "importing diffusers for the class (once)"):
            found = library("makers").PipelineMaker(pipeline_class).import_classes(found)
    dtype, doing = settle_dtype(wanted.dtype, found), ""
    with paused_gc():
        if not all(known_rule(checkpoint, dtype) for checkpoint in found.checkpoints):
            doing = "finding the dtype rules of its classes (once for each dtype)"
            importing = "importing diffusers and transformers for these rules (once for each dtype)"
            with progress.during(Phase.IMPORT, importing), whole_libraries():
                library("rules").import_libraries()
        with progress.during(Phase.PLAN, doing):
            return found, {each.component: rule_for(each, dtype) for each in found.checkpoints}


def find_certain(wanted: Wanted, *, may_be_unread: bool = False) -> Source:
    """Find a source whose weights are those that were asked for.

    Args:
        wanted: the source.
        may_be_unread: leave a source without weights that shmload reads, or without any of the
            variant, to the library: it then has no checkpoints.

    Raises:
        SourceNotFound: it is nowhere, has no weights of the variant, or several files to choose
            from.
        UnknownComponent, CheckpointError.
    """
    found = find_whole_source(wanted)
    if found.is_modular and may_be_unread:  # a path is lent, which looks like the root alone
        below = [each for each in found.checkpoints if each.folder.is_relative_to(found.root)]
        found = msgspec.structs.replace(found, checkpoints=tuple(below))
    if found.choices:
        raise SourceNotFound(
            f"{wanted.source}: it has several files of weights: {', '.join(found.choices)}; choose "
            "with weight_name"
        )
    shards, variant = found.shards, wanted.variant
    if variant and shards and variant not in {variant_of(shard.name) for shard in shards}:
        if not may_be_unread:
            raise SourceNotFound(f"{wanted.source}: {why_none_is_read(found)}")
        return msgspec.structs.replace(found, checkpoints=())
    return found


def require_read(source: Source, wanted: Wanted) -> None:
    """Check that shmload reads some weights of a source.

    Raises:
        SourceNotFound: it reads none.
    """
    if not source.checkpoints:
        raise SourceNotFound(f"{wanted.source}: {why_none_is_read(source)}")


@contextlib.contextmanager
def complete_load(
    source: Source,
    rules: Mapping[str, Rule],
    progress: Progress,
    stay: Stay,
    workers: int | None,
    verify: bool,
) -> Iterator[Load]:
    """Load and wait until every segment is complete; a context that ends the load.

    Args:
        source: as for `Load`.
        rules: as for `Load`.
        progress: shows the load's progress; stays the caller's.
        stay: as for `Load`.
        workers: as for `Load`.
        verify: recompute the digest of every segment.

    Raises:
        CheckpointError, CapacityError, WorkerError, SegmentError.
    """
    with Load(source, rules, stay=stay, progress=progress, workers=workers) as load:
        load.wait()
        if verify:
            load.verify()
        yield load
