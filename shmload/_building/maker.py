"""A maker: what builds one pipeline or model, by a method of its class.

A maker imports no library before it must: workers decode while the classes are imported.
"""

import os
from collections.abc import Mapping
from typing import Any

from shmload._checkpoints.dtypes import TORCH_NAMES, is_auto, parse_dtype
from shmload._checkpoints.rule import RAW, Rule, likely_rule, rule_for
from shmload._checkpoints.source import Checkpoint, Source
from shmload._checkpoints.wanted import Wanted
from shmload._compat import dtype_keyword


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
    uncast_rule = RAW
    """The rule of a load without conversion."""

    def find(self, wanted: Wanted, kwargs: dict[str, Any]) -> tuple[Source, object]:
        """Find what is to be made.

        Args:
            wanted: what to load.
            kwargs: for the library; changed.

        Returns:
            The source, and the dtype, in which `auto` is a name where the library needs one.

        Raises:
            ShmloadError: the source, or the dtype, is at fault.
        """
        raise NotImplementedError

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

    def component(self, made: Any, name: str) -> Any:
        """Return a component of what was made; None if it lacks it. A model has an empty name."""
        return made[0] if isinstance(made, tuple) else made

    def components(self, made: Any) -> Mapping[str, Any]:
        """Return all components of what was made by name."""
        return {"": self.component(made, "")}


def is_left_to_library(dtype: object) -> bool:
    """Tell whether a dtype is no dtype: transformers' `auto`, or its dict by a model's parts."""
    return isinstance(dtype, Mapping) or is_auto(dtype)


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
