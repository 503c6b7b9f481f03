"""The model libraries while they make models: whose turn it is, and what they patch meanwhile.

Their loading is not thread-safe: it sets torch's default dtype and replaces functions of torch for
all threads. It restores them itself; a child that is forked meanwhile restores them here. One
thread at a time makes models for shmload; what a load calls meanwhile is the library's own, and
`redirect` leaves it alone. It imports nothing heavy.
"""

import contextlib
import sys
import time
import types
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from shmload._compat import EMPTYING
from shmload._host.changes import Change, add_lock
from shmload.errors import LibrariesDisturbed

if TYPE_CHECKING:
    import torch

_PATCHING = ("accelerate", "diffusers", "transformers")
_DTYPE = "the default dtype"

libraries_lock = add_lock("the libraries")


@contextlib.contextmanager
def libraries() -> Iterator[None]:
    """Keep other threads from making models in the block."""
    with libraries_lock, _patching.made():
        yield


def _patchable() -> dict[str, Any]:
    """Return what the libraries may replace: what some owners have, and the default dtype."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.__spec__, "_initializing", False):
        return {}
    found: dict[str, Any] = {name: dict(vars(owner)) for name, owner in _owners(torch).items()}
    return found | {_DTYPE: torch.get_default_dtype()}


def _owners(torch: Any) -> dict[str, Any]:
    owners = {"torch": torch, "torch.nn.init": torch.nn.init, "torch.nn.Module": torch.nn.Module}
    for name, module in tuple(vars(torch.nn.modules).items()):
        if isinstance(module, types.ModuleType):
            owners[f"torch.nn.modules.{name}"] = module
    models: Any = sys.modules.get("transformers.modeling_utils")
    if hasattr(models, "PreTrainedModel"):
        owners |= {models.__name__: models, "PreTrainedModel": models.PreTrainedModel}
    return owners


def _restore(before: dict[str, Any]) -> None:
    """Undo in a forked child what the libraries have patched in its parent."""
    if not before:
        return
    torch: Any = sys.modules["torch"]
    torch.set_default_dtype(before.pop(_DTYPE))
    owners = _owners(torch)
    for owner_name, content in before.items():
        owner = owners[owner_name]
        for name, was in content.items():
            now = vars(owner).get(name)
            if was is not now and (isinstance(was, bool) or _is_of_libraries(now)):
                setattr(owner, name, was)


def _is_of_libraries(value: object) -> bool:
    return str(getattr(value, "__module__", None)).partition(".")[0] in _PATCHING


_patching = Change("what the libraries patch", _patchable, None, _restore)


# Inside a load ------------------------------------------------------------------------------------

Said = set[tuple[str, int, str]]
"""What the libraries have logged: names of loggers, levels, messages."""

_said: ContextVar[Said | None] = ContextVar("shmload_inside_a_load", default=None)


def is_inside() -> bool:
    """Tell whether this thread, or this asynchronous task, is in a load."""
    return _said.get() is not None


def said_here() -> Said:
    """Return what was logged while models were built in this load, for the load to add to."""
    said = _said.get()
    return set() if said is None else said


@contextlib.contextmanager
def inside() -> Iterator[Said]:
    """Mark a block as part of a load; yield what is logged while models are built in it."""
    said = said_here()
    token = _said.set(said)
    try:
        yield said
    finally:
        _said.reset(token)


# Models without weights --------------------------------------------------------------------------

# accelerate's `init_empty_weights`, which `load_lora_weights`, peft and `from_pretrained` enter,
# replaces `torch.nn.Module.register_parameter` for the whole process. A model of transformers that
# another thread builds in that time gets empty parameters and keeps them. If two threads are in it
# and leave it in the order in which they came, the replacement stays for good.
_WAIT_S = 5.0  # adapters of several GiB are put into a model in about a second
_POLL_S = 0.01


def is_emptied(models: Iterable["torch.nn.Module"]) -> bool:
    """Tell whether a model of transformers has a parameter without bytes."""
    from transformers import PreTrainedModel  # not at the top: this module imports nothing heavy

    return any(
        parameter.is_meta
        for model in models
        if isinstance(model, PreTrainedModel)
        for parameter in model.parameters()
    )


def empties() -> bool:
    """Tell whether torch now makes every new parameter empty, in all threads."""
    torch: Any = sys.modules["torch"]
    return bool(torch.nn.Module.register_parameter.__name__ == EMPTYING)


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
