"""Dtypes for `from_pretrained`: torch's own, in place of their names."""

from collections.abc import Mapping

import torch

from shmload._checkpoints.dtypes import TORCH_NAMES, parse_dtype


def as_torch(dtype: object) -> object:
    """Return torch's dtypes for names, alone or in a dict by component.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    if isinstance(dtype, Mapping):
        return {name: as_torch(value) for name, value in dtype.items()}
    return None if dtype is None else getattr(torch, TORCH_NAMES[parse_dtype(dtype)])


def diffusers_keyword() -> str:
    """Return what diffusers calls the argument; the older name still works but warns."""
    from diffusers.pipelines import pipeline_utils

    return "dtype" if hasattr(pipeline_utils, "_resolve_dtype") else "torch_dtype"
