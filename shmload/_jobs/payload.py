"""Functions, items and results as bytes, as they cross between the processes of one job.

Functions and classes of `__main__`, of a notebook, and lambdas go by value (cloudpickle). Tensors
go as their bytes alone: torch's own pickling of a view would write all of its storage, which for a
weight is a whole segment.

Only for processes that one user's program has started, over sockets that no other process has:
what is unpickled here can run any code.
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

# The length of a frame has four bytes, and a frame is a little larger than its payload.
MAX_NBYTES = (1 << 32) - (1 << 20)


class Payload(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pickled object, with the bytes of its tensors and arrays in the order of their use."""

    pickled: bytes
    buffers: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        """Size of all of it, in bytes."""
        return len(self.pickled) + sum(map(len, self.buffers))


def dump(value: object) -> Payload:
    """Pickle an object.

    Tensors arrive on the CPU, contiguous and without their autograd history.

    Raises:
        ArgumentError: it is too large.
        Exception: what the object's own pickling raises.
    """
    # In a process that multiprocessing spawned, the program's main module has this name.
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
    """Pickle an error, or a `RuntimeError` with its text if it cannot be pickled and unpickled."""
    with contextlib.suppress(Exception):  # its class can raise anything
        payload = dump(error)
        # Many errors can be pickled but not unpickled.
        if isinstance(load(payload), BaseException):
            return payload
    return dump(RuntimeError(describe_error(error)))


def describe_error(error: BaseException) -> str:
    """Return class, message and notes of an error; never raises.

    Not the text of Python's tracebacks, which add what does not cross to another process.
    """
    try:
        text = str(error)
    except Exception:  # its class can raise anything
        text = "<exception str() failed>"
    notes = getattr(error, "__notes__", None)
    texts = [note for note in notes if isinstance(note, str)] if isinstance(notes, list) else []
    name = type(error).__name__
    return "; ".join([f"{name}: {text}" if text else name, *texts])


def format_traceback() -> str:
    """Return the traceback of the current exception as text that UTF-8 can encode.

    Names of files in its message may have surrogates, which UTF-8 cannot encode.
    """
    return traceback.format_exc().encode(errors="backslashreplace").decode()


def load(payload: Payload) -> Any:
    """Unpickle an object; its arrays and tensors are writable.

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
    """Return the bytes of a tensor, contiguous and on the CPU, as a numpy array."""
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy()


def _is_plain(tensor: Any) -> bool:
    """Tell whether bytes, shape and dtype are all that a tensor is."""
    layout = str(tensor.layout)
    return layout == "torch.strided" and not (tensor.is_quantized or tensor.is_meta)


def _makes_own_text(kind: type[BaseException]) -> bool:
    """Tell whether unpickling would call the class's own `__init__` with the finished message."""
    is_own = isinstance(kind.__init__, FunctionType)
    return is_own and kind.__reduce__ is BaseException.__reduce__


def _make_error(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    error = kind.__new__(kind)
    error.args = args
    return error


def _make_tensor(dtype: str, shape: tuple[int, ...], content: Any) -> Any:
    import torch  # sender and receiver have the same libraries

    if not len(content):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(content, dtype=getattr(torch, dtype)).reshape(shape)
