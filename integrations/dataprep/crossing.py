"""How functions, items, results and errors cross between a job and its processes.

Functions and classes of `__main__`, of a notebook, and lambdas go by value (cloudpickle). Tensors
go as their bytes alone: torch's own pickling of a view would write its whole storage, which for a
weight is a whole segment. Those that are large go through memory that both ends share.

Only for processes that one program has started, over sockets that no other process has: what is
unpickled here can run any code.
"""

import contextlib
import io
import mmap
import pickle
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle

# To copy so much through the socket takes as long as a message.
_LARGE_NBYTES = 1 << 16
_HUGE_NBYTES = 2 << 20  # of a huge page: to copy into it takes a tenth of the time
_NOTES = struct.Struct("qqq")
MEMORY_NBYTES = 64 << 30
"""The size of the file of a `Memory`. It takes the pages that are in use."""


class Memory:
    """Memory that a job and one of its processes have in common.

    The process notes there what it is at, which the job reads without a message; and it puts there
    the large buffers of its results, which the job copies. So pages are made once, not for each
    result: to make and to free one costs more than to copy it.

    Args:
        fd: a file in memory of `MEMORY_NBYTES`, the same for both; stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, MEMORY_NBYTES)
        self.used = self._begun = 0
        """Where the buffers end that were put here, in bytes."""

    @property
    def notes(self) -> tuple[int, int, float]:
        """The number of its item, -1 if there is none; how many it has begun; since when, in s."""
        number, begun, since_ns = _NOTES.unpack_from(self._map)
        return number, begun, (time.monotonic_ns() - since_ns) / 1e9

    def begin(self, number: int) -> None:
        """Note that the process begins an item."""
        self._begun += 1
        _NOTES.pack_into(self._map, 0, number, self._begun, time.monotonic_ns())

    def clear(self) -> None:
        """Note that nothing is begun, and forget the buffers."""
        self._begun, self.used = -1, _NOTES.size
        self.begin(-1)

    def put(self, content: memoryview) -> tuple[int, int]:
        """Copy a buffer to the end, and return its place."""
        place = self.used, self.used + content.nbytes
        self._map[place[0] : place[1]] = content
        self.used = place[1]
        return place

    def get(self, place: tuple[int, int]) -> bytearray | mmap.mmap:
        """Return a copy of what the other has put at a place."""
        nbytes = place[1] - place[0]
        with memoryview(self._map) as whole, whole[place[0] : place[1]] as content:
            if nbytes < _HUGE_NBYTES:
                return bytearray(content)
            copy = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE)
            copy.madvise(mmap.MADV_HUGEPAGE)
            copy[:] = content
            return copy

    def close(self) -> None:
        """Unmap it."""
        self._map.close()


class Parcel(NamedTuple):
    """A pickled object."""

    pickled: bytes
    places: Sequence[tuple[int, int]] = ()
    """Where its large buffers lie in the memory of the process that has pickled it."""
    is_error: bool = False
    """Whether it is the error that stands in the place of a result."""


def dump(value: object, memory: Memory) -> Parcel:
    """Pickle an object.

    Args:
        value: the object.
        memory: gets its large buffers.

    Raises:
        Exception: what the object's own pickling raises.
    """
    places: list[tuple[int, int]] = []

    def goes_inside(buffer: pickle.PickleBuffer) -> bool:
        content = buffer.raw()
        is_small = content.nbytes < _LARGE_NBYTES
        if not is_small:
            places.append(memory.put(content))
        return is_small

    return Parcel(dump_whole(value, goes_inside), places)


def load(parcel: Parcel, memory: Memory) -> tuple[Any, BaseException | None]:
    """Unpickle a result, and no error; or None, and an error: the one in its place, or a new one.

    Its tensors are on the CPU, contiguous, and without their history.
    """
    try:
        value = pickle.loads(parcel.pickled, buffers=map(memory.get, parcel.places))
    except Exception as exc:  # of the result's own unpickling
        return None, exc
    return (None, value) if parcel.is_error else (value, None)


def dump_error(error: BaseException) -> Parcel:
    """Pickle an error, with its traceback as a note.

    If it cannot be pickled and unpickled, a `RuntimeError` with its text goes instead.
    """
    note = f"in a process of the job:\n{''.join(traceback.format_exception(error))}"
    with contextlib.suppress(Exception):  # its class can raise anything
        error.add_note(note)
        pickled = dump_whole(error)
        if isinstance(pickle.loads(pickled), BaseException):
            return Parcel(pickled, is_error=True)
    plain = RuntimeError(describe_error(error))
    plain.add_note(note)
    return Parcel(dump_whole(plain), is_error=True)


def describe_error(error: BaseException) -> str:
    """Return class and message of an error."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def bytes_of(tensor: Any) -> Any:
    """Return the bytes of a tensor, contiguous and on the CPU, as a numpy array of uint8."""
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy()


def dump_whole(
    value: object, goes_inside: Callable[[pickle.PickleBuffer], bool] | None = None
) -> bytes:
    """Pickle an object with those of its buffers that go inside, or all; raise as `dump`."""
    # In a process that multiprocessing spawned, the program's main module has this name.
    if spawned := sys.modules.get("__mp_main__"):
        cloudpickle.register_pickle_by_value(spawned)
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=goes_inside).dump(value)
        return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # without it there are no tensors
        if torch and type(obj) in (torch.Tensor, torch.nn.Parameter):
            is_plain = str(obj.layout) == "torch.strided" and not (obj.is_quantized or obj.is_meta)
            if is_plain:  # bytes, shape and dtype are all that it is
                dtype = str(obj.dtype).removeprefix("torch.")
                return _make_tensor, (dtype, tuple(obj.shape), pickle.PickleBuffer(bytes_of(obj)))
        return super().reducer_override(obj)


def _make_tensor(dtype: str, shape: tuple[int, ...], content: Any) -> Any:
    import torch  # sender and receiver have the same libraries

    if not len(content):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(content, dtype=getattr(torch, dtype)).reshape(shape)
