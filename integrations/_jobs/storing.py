"""What a job's function returns, as the arrays that a folder of results takes."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shmload._checkpoints.dtypes import FLOATS, NBITS, TORCH_NAMES
from shmload.integrations._jobs.dispatch import Item
from shmload.integrations._jobs.payload import bytes_of
from shmload.integrations.results import Array, ResultFolder

if TYPE_CHECKING:
    import torch

_DTYPES = {name: dtype for dtype, name in TORCH_NAMES.items()}


class Storing:
    """A job's function, which turns its results into arrays in the process that computed them.

    Args:
        function: returns tensors or numpy arrays by name.
        save_dtype: torch's name of the dtype for floating results; None leaves each as it is.
    """

    def __init__(self, function: Callable[[Any, Any], Any], save_dtype: str | None = None) -> None:
        self._function = function
        self._save_dtype = save_dtype

    def __call__(self, pipe: Any, item: Any) -> dict[str, Array]:
        """Call the function and return its arrays by name.

        Raises:
            TypeError: it returned something else.
        """
        found = self._function(pipe, item)
        if not isinstance(found, Mapping):
            raise TypeError(
                f"the function returned a {type(found).__name__}; to be stored, a result must be a "
                "dict of tensors or arrays by name"
            )
        return {name: _array(name, value, self._save_dtype) for name, value in found.items()}


class Undone:
    """The items of a run that are not settled yet, with their keys.

    Args:
        items: all items of the run; iterated once.
        key: returns an item's key; None for its number as text of eight digits.
        results: the folder; stays the caller's.
        on_done: called for each item that is settled already.
    """

    def __init__(
        self,
        items: Iterable[Any],
        key: Callable[[Any], str] | None,
        results: ResultFolder,
        on_done: Callable[[], object],
    ) -> None:
        self._items = items
        self._key = key
        self._results = results
        self._on_done = on_done
        self.keys: dict[int, str] = {}
        """Keys of the items that were yielded, by number; the caller removes them."""
        self.count = 0
        """How many items were seen so far, settled ones included."""
        self.has_results = False
        """Whether an item was seen whose result was stored already."""

    def __iter__(self) -> Iterator[Item]:
        for index, value in enumerate(self._items):
            self.count = index + 1
            key = self._key(value) if self._key else f"{index:08}"
            if self._results.is_settled(index, key):
                self.has_results |= self._results.is_done(index, key)
                self._on_done()
            else:
                self.keys[index] = key
                yield Item(index, value)


def _array(name: Any, value: Any, save_dtype: str | None) -> Array:
    if not isinstance(name, str) or not name or "/" in name:
        raise TypeError(f"{name!r} cannot be the name of an array; give text without a slash")
    torch = sys.modules.get("torch")  # without it there are no tensors
    if torch and isinstance(value, torch.Tensor):
        if save_dtype and value.is_floating_point():
            value = value.to(getattr(torch, save_dtype))
        return _of_tensor(name, value)
    dtype = _DTYPES.get(getattr(getattr(value, "dtype", None), "name", ""))
    if dtype is None or not hasattr(value, "__array__"):
        raise _refused(name, value)
    found = np.asarray(value)
    if save_dtype and dtype in FLOATS:
        import ml_dtypes  # makes numpy know the names of bfloat16 and of the float8 kinds

        found = found.astype(getattr(ml_dtypes, save_dtype, save_dtype))
        dtype = _DTYPES[save_dtype]
    little = found.astype(found.dtype.newbyteorder("<"), copy=False)
    return Array(dtype, tuple(found.shape), little.tobytes())


def _of_tensor(name: str, tensor: "torch.Tensor") -> Array:
    dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
    if str(tensor.layout) != "torch.strided":
        raise TypeError(
            f"{name!r} has the layout {tensor.layout}; give a dense tensor: .to_dense()"
        )
    if dtype is None:
        raise _refused(name, tensor)
    shape = tuple(tensor.shape)
    if NBITS[dtype] < 8:  # torch's shape counts bytes, which several elements share
        shape = (*shape[:-1], shape[-1] * 8 // NBITS[dtype])
    return Array(dtype, shape, bytes_of(tensor).tobytes())


def _refused(name: str, value: Any) -> TypeError:
    kind = f"{type(value).__name__} {getattr(value, 'dtype', '')}".strip()
    return TypeError(
        f"{name!r} is a {kind}; it must be a tensor or a numpy array of a dtype that safetensors "
        "has"
    )
