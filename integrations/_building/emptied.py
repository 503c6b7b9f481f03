"""Notices models that were built without weights, because another thread changed torch meanwhile.

accelerate's `init_empty_weights`, which `load_lora_weights`, peft and `from_pretrained` enter,
replaces `torch.nn.Module.register_parameter` for the whole process. A model of transformers that is
built by another thread in that time gets empty parameters and keeps them. If two threads are in it
and leave it in the order in which they came, the replacement stays for good.
"""

import time
from collections.abc import Iterable

import torch

from shmload.errors import LibrariesDisturbed

_REPLACEMENT = "register_empty_parameter"
_WAIT_S = 5.0  # adapters of several GiB are put into a model in about a second
_POLL_S = 0.01


def is_emptied(models: Iterable[torch.nn.Module]) -> bool:
    """Tell whether a model of transformers has a parameter without bytes."""
    from transformers import PreTrainedModel  # here, so that skeletons need no import of it

    return any(
        parameter.is_meta
        for model in models
        if isinstance(model, PreTrainedModel)
        for parameter in model.parameters()
    )


def empties() -> bool:
    """Tell whether torch now makes every new parameter empty, in all threads."""
    return torch.nn.Module.register_parameter.__name__ == _REPLACEMENT


def require_undisturbed(given: object) -> None:
    """Wait until torch makes parameters as ever.

    Args:
        given: the source, for the error.

    Raises:
        LibrariesDisturbed: it does not within five seconds.
    """
    deadline = time.monotonic() + _WAIT_S
    while empties():
        if time.monotonic() > deadline:
            raise LibrariesDisturbed(str(given))
        time.sleep(_POLL_S)
