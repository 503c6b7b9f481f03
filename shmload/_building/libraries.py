"""The model libraries while they make models: one thread at a time.

Their loading is not thread-safe: it sets torch's default dtype and replaces functions of torch for
all threads. What a load of shmload calls meanwhile is the library's own. It imports nothing heavy.
"""

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from shmload._host.changes import add_lock

if TYPE_CHECKING:
    import torch

libraries_lock = add_lock()
"""Held by the thread that makes models for shmload."""
_is_inside: ContextVar[bool] = ContextVar("shmload_inside_a_load", default=False)


def is_inside() -> bool:
    """Tell whether this thread, or this asynchronous task, is in a load."""
    return _is_inside.get()


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Mark a block as part of a load."""
    token = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(token)


def is_emptied(models: Iterable["torch.nn.Module"]) -> bool:
    """Tell whether a model of transformers has a parameter without bytes.

    accelerate's `init_empty_weights`, which `load_lora_weights` and peft enter, replaces a method
    of torch for the whole process. A model that another thread builds meanwhile gets empty
    parameters and keeps them.
    """
    from transformers import PreTrainedModel  # not at the top: this module imports nothing heavy

    return any(
        parameter.is_meta
        for model in models
        if isinstance(model, PreTrainedModel)
        for parameter in model.parameters()
    )
