"""A maker: what builds one pipeline or model, by the `from_pretrained` of its class.

Makers import no library before they must: workers decode while the classes are imported.
"""

import os
from collections.abc import Collection, Mapping
from typing import Any

from shmload._building.compat import dtype_keyword
from shmload._checkpoints.dtypes import TORCH_NAMES, parse_dtype
from shmload._checkpoints.resolve import Checkpoint, Source
from shmload._checkpoints.rule import Rule, likely_rule, rule_for


class NotToBeCast(Exception):
    """The segments should have the stored dtypes, and no stored file is on this machine."""


class Maker:
    """Builds what one call loads, and knows what it consists of; by default a single model."""

    is_of_pipelines = False
    """Whether it makes pipelines, and not single models."""
    takes_path = False
    """Whether the library gets a `Path` and not a text, which it notes in a model."""
    reads_weights = False
    """Whether building reads weights, so that they must be decoded before."""
    keeps_blocks = False
    """Whether it makes models of quantised blocks, beside which other tensors are cast."""
    computed = ""
    """Name of an operation by which `make` computed with weights; empty if it only moved them.

    Such weights must not be cast before.
    """
    left_out: Collection[str] = ()
    """Components that are passed as None because the user chose others."""

    @property
    def name(self) -> str | None:
        """Name of the class that was asked for, if another process finds it by that; else None."""
        return None

    def foresee(self, source: Source) -> Source | None:
        """Return the source as the classes will take it, without an import; None if unknown."""
        return source

    def import_classes(self, source: Source) -> Source:
        """Import the classes that are needed; a second call does nothing more.

        Args:
            source: as it was found.

        Returns:
            The source as the classes take it: without components that they leave out.

        Raises:
            ArgumentError: there is no such class, or it loads something else.
        """
        raise NotImplementedError

    def likely_rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the probable rule of a checkpoint, without an import."""
        return likely_rule(checkpoint, dtype)

    def rule(self, checkpoint: Checkpoint, dtype: object) -> Rule:
        """Return the rule of a checkpoint, by the classes that were imported."""
        return rule_for(checkpoint, dtype)

    def make(self, path: str | os.PathLike[str], dtype: object, kwargs: Mapping[str, Any]) -> Any:
        """Let the library build it.

        Args:
            path: of the directory to read.
            dtype: as the user gave it; None to give none.
            kwargs: the other arguments of `from_pretrained`.

        Raises:
            Exception: any error of the library.
        """
        raise NotImplementedError

    def part(self, made: Any, component: str) -> Any:
        """Return a component of what was made; None if it lacks it. A model has an empty name."""
        return made[0] if isinstance(made, tuple) else made

    def parts(self, made: Any) -> Mapping[str, Any]:
        """Return all components of what was made by name."""
        return {"": self.part(made, "")}


def as_torch(dtype: object) -> object:
    """Return torch's dtypes for names, alone or in a dict by component.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    import torch  # not at the top: a maker decides what to decode before that

    if isinstance(dtype, Mapping):
        return {name: as_torch(value) for name, value in dtype.items()}
    return None if dtype is None else getattr(torch, TORCH_NAMES[parse_dtype(dtype)])


def with_dtype(kwargs: Mapping[str, Any], dtype: object) -> dict[str, Any]:
    """Return arguments for a method of diffusers, with torch's dtype if there is one."""
    target = as_torch(dtype)
    return {**kwargs, **({} if target is None else {dtype_keyword(): target})}
