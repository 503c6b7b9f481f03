"""Watches that code which gets a file's tensors moves them and does not compute with them.

Casting a tensor, and then moving its elements to other places, is the same as moving and then
casting. With sums and products it is not: weights that are used in one must not be cast before.
"""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shmload._host.linux import Inode, inode_of
from shmload.integrations._building.mapped import Spans

# Operations that give or take elements unchanged. Those that return a view need no entry.
_MOVES = frozenset(
    {"cat", "clone", "copy_", "flip", "gather", "index_select", "repeat", "roll", "stack"}
)
# Operations that ask for a tensor's shape and dtype, and not for its elements.
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
        name = func.overloadpacket.__name__
        if not self.computed and name not in _LIKENESSES and self._any_watched((args, given)):
            if name == _CAST and given.get("dtype") not in (None, *self._dtypes):
                self.computed = f"a cast to {given['dtype']}"
            elif name == _CAST or name in _MOVES:
                self._watch(_floats_in((args, result) if name.endswith("_") else result))
            elif not _returns_view(func):
                self.computed = name
        return result

    def _any_watched(self, values: object) -> bool:
        return any(map(self._is_watched, _floats_in(values)))

    def _is_watched(self, tensor: torch.Tensor) -> bool:
        address = tensor.untyped_storage().data_ptr()
        if not self._is_mapped:  # the file is mapped at some moment within the context
            self._spans = Spans({self._inode})
            self._is_mapped = not self._spans.is_empty
        return address in self._copies or self._spans.find_address(address) is not None

    def _watch(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._copies[storage.data_ptr()] = storage


def _floats_in(values: object) -> list[torch.Tensor]:
    """Return the tensors of floats that have bytes on the host."""
    leaves = tree_leaves(values)
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    return [each for each in tensors if each.is_cpu and each.is_floating_point() and each.numel()]


@functools.cache
def _returns_view(func: Any) -> bool:
    """Tell whether an operation returns a tensor's own elements, and writes to none."""
    aliases = [each.alias_info for each in func._schema.returns]
    return bool(aliases) and all(each is not None and not each.is_write for each in aliases)
