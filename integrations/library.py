"""What the core asks of the model libraries: the inside of `shmload._checkpoints.library`."""

from collections.abc import Collection
from typing import Any

from shmload._building import rules
from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._checkpoints.rule import Rule
from shmload._placement.modules import Component


def import_libraries() -> None:
    """Import diffusers and transformers, and with them torch; takes some seconds once."""
    rules.import_libraries()


def derive_rule(checkpoint: Checkpoint, target: str | None) -> Rule:
    """Return the dtype rule of a checkpoint's class, as `_building.rules.derive_rule` does."""
    return rules.derive_rule(checkpoint, target)


def describe_components(
    source: Source, dtype: object, only: Collection[str] | None
) -> tuple[Component, ...]:
    """Return the module trees of a pipeline's components, from `_building.module_trees`."""
    # Not at the top: a rule needs no torch.
    from shmload._building.module_trees import components_of

    return components_of(source, dtype, only)


def as_taken(source: Source, pipeline_class: object) -> Source:
    """Return a pipeline as a class takes it: without components that the class leaves out.

    Raises:
        ArgumentError: there is no class of that name, or it loads no pipelines.
        LibraryMissing: packages that it needs are missing.
    """
    # Not at the top: a rule does not need it.
    from shmload._building.pipeline_maker import PipelineMaker

    return PipelineMaker(pipeline_class).taken(source)


def skeletons_of(given: str) -> list[tuple[str, str, str]]:
    """Return class, dtype and the reason against a skeleton, for each remembered load of a source.

    Args:
        given: the source as the user named it; the reason is empty where there is a skeleton.
    """
    from shmload._building.skeletons import skeletons_of

    found = skeletons_of(given)
    return [(each.class_name, each.dtype, each.reason) for each in found]


def download(repo_id: str, **kwargs: Any) -> str:
    """Bring the files of a pipeline into the hub cache; return their directory.

    Args:
        repo_id: the hub id.
        kwargs: as for `DiffusionPipeline.download`.
    """
    from diffusers import DiffusionPipeline

    # So the card comes, too, which names the prior of a combined pipeline.
    given = kwargs | {"load_connected_pipeline": True}
    return str(DiffusionPipeline.download(repo_id, **given))
