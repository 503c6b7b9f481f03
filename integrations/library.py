"""What the core asks of the model libraries: the inside of `shmload._checkpoints.library`."""

from collections.abc import Collection
from typing import Any

from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._checkpoints.rule import Rule
from shmload._placement.modules import Component
from shmload.integrations._building import rules


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
    from shmload.integrations._building.module_trees import components_of

    return components_of(source, dtype, only)


def download(repo_id: str, **kwargs: Any) -> str:
    """Bring the files of a pipeline into the hub cache; return their directory.

    Args:
        repo_id: the hub id.
        kwargs: as for `DiffusionPipeline.download`.
    """
    from diffusers import DiffusionPipeline

    return str(DiffusionPipeline.download(repo_id, **kwargs))
