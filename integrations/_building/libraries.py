"""The model libraries while they make models: one thread at a time, and what they patch meanwhile.

Their loading is not thread-safe: it sets torch's default dtype and replaces functions of torch for
all threads. It restores them itself; a child that is forked meanwhile restores them here.
"""

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

from shmload._host.changes import Change, add_lock

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
