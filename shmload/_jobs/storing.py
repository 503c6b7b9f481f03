"""A job that stores: its items, its results as arrays, and its end if all items fail alike."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shmload._checkpoints.dtypes import FLOATS, NBITS, TORCH_NAMES
from shmload._jobs.dispatch import Item
from shmload._jobs.payload import bytes_of
from shmload.errors import ItemError, JobFailed
from shmload.integrations.results import Array, ResultFolder

if TYPE_CHECKING:
    import torch

MAX_SAME_ERRORS = 8
"""So many items may fail with the same error before any item has a result."""
_MAX_HELD = 4 * MAX_SAME_ERRORS  # with several errors, as of files that are each broken
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


# Errors of the first items ------------------------------------------------------------------------


def end_if_all_fail(outcomes: Iterable[Item], has_results: Callable[[], bool]) -> Iterator[Item]:
    """Yield the outcomes; hold errors back until an item has a result.

    A pipeline that lacks a component fails at every item. One error says that better than
    thousands.

    Args:
        outcomes: of a run.
        has_results: tells whether earlier runs have stored a result; then the items are at fault.

    Raises:
        JobFailed: no item has a result, and `MAX_SAME_ERRORS` have failed with the same error; or
            the items end, and most of them have failed with the same error, but two at least. None
            of them has come out.
    """
    outcomes = iter(outcomes)
    held: list[Item] = []
    count: Counter[str] = Counter()
    for outcome in outcomes:
        error = outcome.value
        if not isinstance(error, ItemError) or has_results() or len(held) == _MAX_HELD:
            yield from held
            yield outcome
            break
        held.append(outcome)
        count[error.reason] += 1
        if count[error.reason] == MAX_SAME_ERRORS:
            raise _failed(error.reason, held, MAX_SAME_ERRORS)
    else:
        for reason, number in count.most_common(1):
            if number > max(1, len(held) // 2):
                raise _failed(reason, held, number)
        yield from held
    yield from outcomes


def _failed(reason: str, held: list[Item], number: int) -> JobFailed:
    many = f"the first {number}" if number == len(held) else f"{number} of the first {len(held)}"
    error = JobFailed(
        f"{many} items failed with the same error and none has a result: {reason}. Nothing was "
        "stored. Mend what these items have in common, the function or the pipeline's components, "
        "or leave them out"
    )
    error.__cause__ = next(each.value for each in held if each.value.reason == reason)
    return error
