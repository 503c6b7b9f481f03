"""The one door from the core to the model libraries.

The core imports neither diffusers nor transformers nor torch: importing them takes 3 s. Four
questions need them. `shmload.integrations.library` answers these and is imported when the first is
asked. No other module of the core names `integrations`.
"""

import importlib
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from shmload._checkpoints.resolve import Checkpoint, Source
    from shmload._checkpoints.rule import Rule
    from shmload._placement.modules import Component


class Library(Protocol):
    """What the core asks of the model libraries."""

    def import_libraries(self) -> None:
        """Import the model libraries, which takes some seconds once."""

    def derive_rule(self, checkpoint: "Checkpoint", target: str | None) -> "Rule":
        """Return the dtype rule of a checkpoint's class; `target` is a safetensors dtype."""

    def describe_components(
        self, source: "Source", dtype: object, only: Collection[str] | None
    ) -> "tuple[Component, ...]":
        """Return the module trees of a pipeline's components, with sizes in bytes."""

    def download(self, repo_id: str, **kwargs: Any) -> str:
        """Bring the files of a hub id into the hub cache; return their directory."""


def library() -> Library:
    """Import the module that answers with the help of the model libraries, and return it."""
    return cast("Library", importlib.import_module("shmload.integrations.library"))
