"""Which tensors of an unpickled object the libraries load, and by which names.

The same rule holds for what is read here without torch, and for what torch unpickles.
"""

import itertools
from collections.abc import Iterator
from typing import Any

# A whole pipeline in one file has its tensors under this key; diffusers looks there, too.
_NESTED = "state_dict"
_MAX_DEPTH = 4
# An IP-Adapter has two state dicts. Its loader in diffusers joins these names and those of the
# tensors with a dot, if the file is in safetensors.
_IP_ADAPTER = {"image_proj", "ip_adapter"}
# In a segment's header that name means something else.
_METADATA = "__metadata__"
# Letters of a name that an error repeats.
_MAX_SHOWN = 200


class UnknownPickle(Exception):
    """The pickle has something that is not read here."""


class NoTensors(UnknownPickle):
    """The pickle is damaged, or has what is no tensor with a name, whoever unpickles it."""


def shorten(name: object) -> str:
    """Return what an error shows of a name, which may have millions of letters."""
    return f"{name!r:.{_MAX_SHOWN}}"


def find_tensors(found: Any, kind: type, *, may_be_nested: bool) -> dict[str, Any]:
    """Return the tensors of a state dict by the names that they have in safetensors.

    Args:
        found: what the pickle has.
        kind: the class of tensors.
        may_be_nested: the file may have a whole pipeline, not one model alone.

    Raises:
        NoTensors: it is no dict, or something in it is no tensor with a name.
    """
    if not isinstance(found, dict):
        raise NoTensors("it holds no dict of tensors")
    tensors: dict[Any, Any] = found
    for _ in range(_MAX_DEPTH):  # a dict may be in itself
        if may_be_nested and isinstance(tensors.get(_NESTED), dict):
            tensors = tensors[_NESTED]
    if tensors.keys() == _IP_ADAPTER:
        parts = [_with_prefix(prefix, part) for prefix, part in tensors.items()]
        tensors = dict(itertools.chain.from_iterable(parts))
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == _METADATA or not isinstance(tensor, kind):
            raise NoTensors(f"its {shorten(name)} is no tensor with a name")
    return tensors


def _with_prefix(prefix: str, part: object) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a state dict in another, with the names that they have in one."""
    if not isinstance(part, dict) or not all(isinstance(name, str) for name in part):
        raise NoTensors(f"its {prefix!r} is no dict of tensors with names")
    for name, tensor in part.items():
        yield f"{prefix}.{name}", tensor
