"""Watches what code does with a file's tensors.

Casting a tensor, and then moving its elements to other places, is the same as moving and then
casting. With sums and products it is not: weights that are used in one must not be cast before.
"""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shmload._building.mapped import Spans
from shmload._host.descriptors import Inode, inode_of

# Operations that give or take elements unchanged. Those that return a view need no entry.
_MOVES = frozenset(
    {"cat", "clone", "copy_", "flip", "gather", "index_select", "repeat", "roll", "stack"}
)
# Operations that take a tensor's shape and dtype, and not its elements.
_LIKENESSES = frozenset(
    {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros"}
    | {"ones_like", "rand_like", "randn_like", "zeros_like"}
)
_CAST = "_to_copy"
# They hold what every smaller float holds, so a cast to them changes nothing.
_WIDE = (torch.float32, torch.float64)


class Movement(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which operations on a file's tensors are watched.

    It sees the calling thread's operations only.

    Args:
        path: the file that the tensors are mapped from.
        dtype: the only dtype that they may be cast to, beside wider ones.

    Attributes:
        computed: name of the first operation that computed with such a tensor; empty if none did.
    """

    def __init__(self, path: str | os.PathLike[str], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed = ""
        self._inode: Inode = inode_of(os.stat(path))
        self._dtypes = (dtype, *_WIDE)
        self._spans = Spans(set())
        self._is_mapped = False
        # By address. What is kept here cannot be freed, and its address not be used again.
        self._copies: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        result = func(*args, **given)
        name = _name_of_reader(func)
        if (
            name
            and not self.computed
            and any(map(self._is_watched, _floats_in([*args, *given.values()])))
        ):
            if name == _CAST and given.get("dtype") not in (None, *self._dtypes):
                self.computed = f"a cast to {given['dtype']}"
            elif name == _CAST or name in _MOVES:
                self._watch(_floats_in([args[0] if name.endswith("_") else result]))
            else:
                self.computed = name
        return result

    def _is_watched(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        if not self._is_mapped:  # the file is mapped at some moment within the context
            self._spans = Spans({self._inode})
            self._is_mapped = bool(self._spans._mappings)
        return address in self._copies or self._spans.find_address(address) is not None

    def _watch(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._copies[storage.data_ptr()] = storage


def _floats_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors of floats that have bytes on the host, in lists too."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_cpu and value.is_floating_point() and value.numel():
                found.append(value)
        elif isinstance(value, list | tuple):
            found += _floats_in(value)
    return found


# Of each build a few thousand operations are looked up here.
@functools.cache
def _name_of_reader(func: Any) -> str:
    """Return the name of an operation that reads elements; empty for any other.

    A view reads none, and its storage is that of the tensor that it shows.
    """
    name: str = func.overloadpacket.__name__
    aliases = [each.alias_info for each in func._schema.returns]
    is_view = bool(aliases) and all(each is not None and not each.is_write for each in aliases)
    return "" if is_view or name in _LIKENESSES else name
