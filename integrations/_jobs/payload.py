"""What crosses between the processes of one job: functions, items and results, as bytes.

Functions and classes of `__main__`, a notebook or a lambda go by value (cloudpickle). Tensors go as
their bytes alone: torch's own pickling of a view would write all of its storage, which for a weight
is a whole segment.

This is for processes that one user's program has started for itself, over sockets that nobody else
has: what is unpickled here can run any code.
"""

import contextlib
import io
import pickle
import sys
import traceback
from types import FunctionType
from typing import Any

import cloudpickle
import msgspec

from shmload._wording import format_nbytes
from shmload.errors import ArgumentError

# The length of a frame has four bytes, and there is a little more than this in it.
MAX_NBYTES = (1 << 32) - (1 << 20)


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pickled object; its tensors and arrays beside it, in the order that they are wanted."""

    pickled: bytes
    buffers: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """What all of it takes, in bytes."""
        return len(self.pickled) + sum(map(len, self.buffers))


def dump(value: object) -> Payload:
    """Pickle an object.

    Tensors arrive on the CPU, contiguous and without their history of gradients.

    Raises:
        ArgumentError: it is too large.
        Exception: what the object's own pickling raises.
    """
    # What multiprocessing makes of a program's main module in a process that it spawns.
    if spawned := sys.modules.get("__mp_main__"):
        cloudpickle.register_pickle_by_value(spawned)
    buffers: list[pickle.PickleBuffer] = []
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        payload = Payload(file.getvalue(), tuple(buffer.raw().tobytes() for buffer in buffers))
    if payload.nbytes > MAX_NBYTES:
        raise ArgumentError(
            f"a {type(value).__name__} of {format_nbytes(payload.nbytes)} cannot cross to another "
            f"process, {format_nbytes(MAX_NBYTES)} can; give smaller ones, or paths"
        )
    return payload


def dump_error(error: BaseException) -> Payload:
    """Pickle an error; one that would not arrive is a `RuntimeError` of what it says."""
    with contextlib.suppress(Exception):  # whatever its class does
        payload = dump(error)
        # Many an error can be pickled, and not be made from what was pickled.
        if isinstance(load(payload), BaseException):
            return payload
    return dump(RuntimeError(describe_error(error)))


def describe_error(error: BaseException) -> str:
    """Return class, message and notes of an error, whatever its class does.

    Not as Python's tracebacks say it: what they add does not cross to another process.
    """
    try:
        text = str(error)
    except Exception:  # whatever its class does
        text = "<exception str() failed>"
    notes = getattr(error, "__notes__", None)
    said = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    name = type(error).__name__
    return "; ".join([f"{name}: {text}" if text else name, *said])


def format_traceback() -> str:
    """Return the traceback of the error at hand as text that UTF-8 can say.

    Messages that name files may hold what it cannot.
    """
    return traceback.format_exc().encode(errors="backslashreplace").decode()


def load(payload: Payload) -> Any:
    """Return the object again; its arrays and tensors can be written to.

    Raises:
        Exception: what the object's own unpickling raises.
    """
    return pickle.loads(payload.pickled, buffers=map(bytearray, payload.buffers))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")  # without it there are no tensors
        if torch and type(obj) in (torch.Tensor, torch.nn.Parameter) and _is_plain(obj):
            buffer = pickle.PickleBuffer(bytes_of(obj))
            return _make_tensor, (str(obj.dtype).removeprefix("torch."), tuple(obj.shape), buffer)
        if isinstance(obj, BaseException) and _makes_own_text(type(obj)):
            return _make_error, (type(obj), obj.args), obj.__dict__ or None
        return super().reducer_override(obj)


def bytes_of(tensor: Any) -> Any:
    """Return the bytes of a tensor as they stand for its values in a row, as a numpy array."""
    import torch

    there = tensor.detach().cpu().resolve_conj().resolve_neg()
    return there.contiguous().reshape(-1).view(torch.uint8).numpy()


def _is_plain(tensor: Any) -> bool:
    """Tell whether a tensor is made of its bytes, shape and dtype."""
    layout = str(tensor.layout)
    return layout == "torch.strided" and not (tensor.is_quantized or tensor.is_meta)


def _makes_own_text(kind: type[BaseException]) -> bool:
    """Tell whether a class of errors has an `__init__` that Python would call with its own text."""
    is_own = isinstance(kind.__init__, FunctionType)
    return is_own and kind.__reduce__ is BaseException.__reduce__


def _make_error(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    return error


def _make_tensor(dtype: str, shape: tuple[int, ...], content: Any) -> Any:
    import torch  # who gets tensors has it

    if not len(content):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(content, dtype=getattr(torch, dtype)).reshape(shape)
