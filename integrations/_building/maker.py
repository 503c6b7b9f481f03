"""A maker: what builds one pipeline or model, by the `from_pretrained` of its class.

Makers import no library before they must: workers decode while the classes are imported.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._checkpoints.rule import Rule


class NotToBeCast(Exception):
    """The segments should have the stored dtypes, and no stored file is on this machine."""


class Maker(Protocol):
    """Builds what one call loads, and knows what it consists of."""

    @property
    def is_of_pipelines(self) -> bool:
        """Whether it makes pipelines, and not single models."""

    @property
    def name(self) -> str | None:
        """Name of the class that was asked for, if another process finds it by that; else None."""

    @property
    def takes_path(self) -> bool:
        """Whether the library gets a `Path` and not a text, which it notes in a model."""

    @property
    def reads_weights(self) -> bool:
        """Whether building reads weights, so that they must be decoded before."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether it makes models of quantised blocks, beside which other tensors are cast."""

    @property
    def computed(self) -> str:
        """Name of an operation by which `make` computed with weights; empty if it only moved them.

        Such weights must not be cast before.
        """

    @property
    def left_out(self) -> Collection[str]:
        """Components that are passed as None because the user chose others."""

    def foresee(self, source: Source) -> Source | None:
        """Return the source as the classes will take it, without an import; None if unknown."""

    def import_classes(self, source: Source) -> Source:
        """Import the classes that are needed; a second call does nothing more.

        Args:
            source: as it was found.

        Returns:
            The source as the classes take it: without components that they leave out.

        Raises:
            ArgumentError: there is no such class, or it loads something else.
        """

    def likely_rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the probable rule of a checkpoint, without an import."""

    def rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the rule of a checkpoint, by the classes that were imported."""

    def make(self, path: str | os.PathLike[str], dtype: object, kwargs: Mapping[str, Any]) -> Any:
        """Let the library build it.

        Args:
            path: of the directory to read.
            dtype: as the user gave it; None to give none.
            kwargs: the other arguments of `from_pretrained`.

        Raises:
            Exception: any error of the library.
        """

    def part(self, made: Any, component: str) -> Any:
        """Return a component of what was made; None if it lacks it."""

    def parts(self, made: Any) -> Mapping[str, Any]:
        """Return all components of what was made by name; a model has an empty one."""
