"""Messages between a job and its processes, and how functions, items, results and errors cross.

Functions and classes of `__main__`, of a notebook, and lambdas go by value (cloudpickle). Tensors
go as their bytes alone: torch's own pickling of a view would write its whole storage, which for a
weight is a whole segment.

Only for processes that one program has started, over sockets that no other process has: what is
unpickled here can run any code.
"""

import contextlib
import io
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

Part = bytes | bytearray | memoryview

_KINDS = ("begin", "task", "ready", "broken", "at", "done", "failed")
# The kind's number, how many parts follow, and the size of all that follows; then each part's size.
_HEAD = struct.Struct("<IIQ")
_SMALL_NBYTES = 1 << 16  # cheaper to copy than to send on its own


class Channel:
    """One end of a socket that carries messages.

    Args:
        end: of a pair of stream sockets; the channel owns it.
    """

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.fileno = end.fileno  # so that it can be waited for
        self.close = end.close

    def limit(self, timeout_s: int) -> None:
        """Have sends and receives raise an OSError that make no progress for so many seconds."""
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self.socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", timeout_s, 0))

    def send(self, kind: str, *parts: Part) -> None:
        """Send a message; blocks until the other end has taken most of it.

        Raises:
            OSError: the other end is gone, or takes nothing any more.
        """
        sizes = struct.pack(f"<{len(parts)}Q", *map(len, parts))
        size = len(sizes) + sum(map(len, parts))
        pending = bytearray(_HEAD.pack(_KINDS.index(kind), len(parts), size) + sizes)
        for part in parts:
            if len(part) <= _SMALL_NBYTES:
                pending += part
            else:
                self.socket.sendall(pending)
                self.socket.sendall(part)
                pending = bytearray()
        self.socket.sendall(pending)

    def receive(self) -> tuple[str, list[Part]]:
        """Return the next message, its kind and its parts; blocks until it is whole.

        Raises:
            EOFError: the other end is gone.
            OSError: no more of it has come.
        """
        number, count, size = _HEAD.unpack(self._read(_HEAD.size))
        body = self._read(size)
        at = 8 * count
        parts: list[Part] = []
        for length in struct.unpack(f"<{count}Q", body[:at]):
            parts.append(body[at : at + length])
            at += length
        return _KINDS[number], parts

    def _read(self, size: int) -> memoryview:
        content = rest = memoryview(bytearray(size))
        while rest:
            got = self.socket.recv_into(rest)
            if not got:
                raise EOFError("the other end of the socket is gone")
            rest = rest[got:]
        return content


def dump(value: object) -> list[Part]:
    """Pickle an object; the bytes of its tensors and arrays are parts of their own.

    Raises:
        Exception: what the object's own pickling raises.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = _pickle(value, buffers.append)
    return [pickled, *(buffer.raw() for buffer in buffers)]


def load(parts: Sequence[Part]) -> Any:
    """Unpickle an object. Its tensors are on the CPU, contiguous, and without their history.

    Raises:
        Exception: what the object's own unpickling raises.
    """
    return pickle.loads(parts[0], buffers=parts[1:])


def dump_whole(value: object) -> bytes:
    """Pickle an object into one part; one that refuses raises a TypeError when it is unpickled."""
    try:
        return _pickle(value, None)
    except Exception as exc:
        return pickle.dumps(_Refusal(describe_error(exc)))


def dump_error(error: BaseException) -> list[Part]:
    """Pickle an error, with its traceback as a note.

    If it cannot be pickled and unpickled, a `RuntimeError` with its text goes instead.
    """
    text = "".join(traceback.format_exception(error))
    # Names of files in it may have surrogates, which UTF-8 cannot encode.
    note = f"in a process of the job:\n{text.encode(errors='backslashreplace').decode()}"
    with contextlib.suppress(Exception):  # its class can raise anything
        error.add_note(note)
        pickled = _pickle(error, None)
        if isinstance(pickle.loads(pickled), BaseException):
            return [pickled]
    plain = RuntimeError(describe_error(error))
    plain.add_note(note)
    return dump(plain)


def describe_error(error: BaseException) -> str:
    """Return class and message of an error; never raises."""
    try:
        text = str(error)
    except Exception:  # its class can raise anything
        text = "<exception str() failed>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def bytes_of(tensor: Any) -> Any:
    """Return the bytes of a tensor, contiguous and on the CPU, as a numpy array of uint8."""
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8).numpy()


def _pickle(value: object, on_buffer: Callable[[pickle.PickleBuffer], object] | None) -> bytes:
    # In a process that multiprocessing spawned, the program's main module has this name.
    if spawned := sys.modules.get("__mp_main__"):
        cloudpickle.register_pickle_by_value(spawned)
    with io.BytesIO() as file:
        _Pickler(file, protocol=5, buffer_callback=on_buffer).dump(value)
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
    content = content if isinstance(content, memoryview) else bytearray(content)
    return torch.frombuffer(content, dtype=getattr(torch, dtype)).reshape(shape)


class _Refusal:
    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, (self._reason,)


def _refuse(reason: str) -> None:
    raise TypeError(f"it cannot be sent to another process: {reason}")
