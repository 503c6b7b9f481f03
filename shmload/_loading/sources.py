"""The first step of a load: find the source, check the arguments, derive its dtype rules."""

from collections.abc import Mapping

from shmload._checkpoints.hub import find_source
from shmload._checkpoints.library import library
from shmload._checkpoints.own_dtypes import settle_dtype
from shmload._checkpoints.resolve import Source
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.rules import is_known, rule_for
from shmload._checkpoints.wanted import Wanted
from shmload._checkpoints.weights import variant_of, variants_below
from shmload._host.collector import paused_gc
from shmload._loading.steps import Step, Steps
from shmload.errors import SourceNotFound, UnknownComponent

Rules = dict[str, Rule]
"""The rule of each component's checkpoint."""


def find_with_rules(wanted: Wanted, steps: Steps) -> tuple[Source, Rules]:
    """Find a source and derive its rules.

    Args:
        wanted: the source.
        steps: count the time of imports and of rules.

    Raises:
        SourceNotFound: it is nowhere, or has no weights of the variant.
        UnknownComponent, UnknownDtype, CheckpointError.
    """
    found = find_source(wanted)
    shards = [shard for checkpoint in found.checkpoints for shard in checkpoint.shards]
    variant = wanted.variant
    if variant and shards and variant not in map(variant_of, shards):
        raise SourceNotFound(
            wanted.source, f"it has no weights of variant {variant!r}{variants_hint(found)}"
        )
    if isinstance(wanted.dtype, Mapping) and found.is_pipeline:
        for name in wanted.dtype.keys() - {"default", *found.components}:
            raise UnknownComponent(name, wanted.source, found.components)
    return found, derive_rules(found, settle_dtype(wanted.dtype, found), steps)


def derive_rules(source: Source, dtype: object, steps: Steps) -> Rules:
    """Return the rule of each component's checkpoint; it may import the libraries.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    checkpoints = source.checkpoints
    with paused_gc():
        if all(is_known(checkpoint, dtype) for checkpoint in checkpoints):
            doing = ""
        else:
            doing = "finding the dtype rules of its classes (once)"
            with steps.during(
                Step.IMPORTING, "importing diffusers and transformers to find dtype rules (once)"
            ):
                library().import_libraries()
        with steps.during(Step.DERIVING_RULES, doing):
            return {each.component: rule_for(each, dtype) for each in checkpoints}


def variants_hint(source: Source) -> str:
    """Return words for the end of an error that name the variants of a source; empty if none."""
    if not source.root.is_dir():
        return ""
    found = variants_below(source.root)
    return f"; it has variant {', '.join(sorted(found))}" if found else ""
