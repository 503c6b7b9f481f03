"""The program that unpickles one file: `python -P -m shmload.workers.unpickle CHANNEL PARENT`.

Started by `_checkpoints.formats.unpickled`, with a Unix socket as descriptor CHANNEL and the id of
the process that asks. It writes the tensors that torch's restricted unpickler makes of the file as
a file of safetensors.

Guarantee: the file is never unpickled in another way. The process ends with the thread that asks,
which waits for the answer. No other module of shmload imports this, and torch with it.
"""

import os
import re
import socket
from collections.abc import Collection
from contextlib import nullcontext, suppress
from typing import Any

import torch

from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES
from shmload._checkpoints.formats.safetensors import build_header
from shmload._checkpoints.formats.tensor_pickle import UnknownPickle, find_tensors, shorten
from shmload._checkpoints.formats.unpickled import (
    MAX_WHY,
    Answer,
    Unpickle,
    Wish,
    is_archive,
    read_unpickle,
)
from shmload._checkpoints.header import TensorSpec
from shmload._host.limits import is_lack_of_memory
from shmload._host.shm import write_at
from shmload._ipc.frames import Inbox, send, serve_parent
from shmload._ipc.procs import die_with_parent
from shmload.errors import CapacityError, ProtocolError

_ALIGNED = 8
_DTYPES = {
    getattr(torch, name): dtype
    for dtype, name in TORCH_NAMES.items()
    if NBITS[dtype] >= 8 and hasattr(torch, name)
}
# In the older form each storage has its number of elements before its bytes.
_COUNT_NBYTES = 8
# An early prototype, as torch's documentation has it. Without it the data is read, too.
_skip_data = getattr(torch.serialization, "skip_data", nullcontext)
# What torch's error says of a name that its unpickler does not know.
_NAME = re.compile(r"GLOBAL (\S+)")


def serve(channel: socket.socket, _: int) -> None:
    """Answer one request."""
    inbox = Inbox(channel)
    while (frame := inbox.next_frame()) is None:
        if not inbox.receive():
            return
    request = read_unpickle(frame)
    if len(inbox.fds) != 2:
        raise ProtocolError("a file was to be unpickled without its two descriptors")
    fd, target_fd = inbox.fds
    send(channel, unpickle_to(target_fd, fd, request))


def unpickle_to(target_fd: int, fd: int, request: Unpickle) -> Answer:
    """Write the tensors of a file into another; return what to answer.

    Args:
        target_fd: an empty file, open to write.
        fd: the file to unpickle.
        request: what is wanted of it.
    """
    try:
        # What it has beside the tensors is not kept.
        may_be_nested = request.wish.may_be_nested
        tensors = find_tensors(
            _load(fd, has_data=request.has_data), torch.Tensor, may_be_nested=may_be_nested
        )
        for name, tensor in tensors.items():
            _require_plain(name, tensor)
            _require_strides(name, tensor, request.wish)
        _write(tensors, target_fd, has_data=request.has_data)
    except UnknownPickle as exc:
        return Answer(refusal=str(exc)[:MAX_WHY])
    except Exception as exc:  # outermost: the one who asks must learn of any error
        lacks_memory = isinstance(exc, CapacityError) or is_lack_of_memory(exc)
        failure = f"{type(exc).__name__}: {exc}"[:MAX_WHY]
        return Answer(failure=failure, lacks_memory=lacks_memory)
    return Answer()


def _load(fd: int, *, has_data: bool) -> Any:
    """Return what torch's restricted unpickler makes of a file; an archive is mapped, not read.

    Args:
        fd: the file.
        has_data: read the storages of a file of the older form; if not, they have any bytes.

    Raises:
        UnknownPickle: torch refuses it, or it is cut short.
        MemoryError: there is no memory for it.
    """
    path = f"/proc/self/fd/{fd}"
    skipping = nullcontext if has_data else _skip_data
    try:
        if is_archive(fd):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        with open(path, "rb") as file, skipping():
            found = torch.load(file, map_location="cpu", weights_only=True)
            left_nbytes = os.fstat(fd).st_size - file.tell()
    except Exception as exc:  # a damaged file may raise anything
        if is_lack_of_memory(exc):
            raise
        named = _NAME.search(str(exc))
        if named:
            raise UnknownPickle(f"torch refuses the name {shorten(named[1])[1:-1]} in it") from exc
        said = " ".join(str(exc).split())
        raise UnknownPickle(f"torch refuses it: {type(exc).__name__}: {said}") from exc
    # A list says which storages follow the pickles. One that is missing there would have any bytes.
    skipped = [] if skipping is nullcontext else _storages_nbytes(found)
    wanted_nbytes = sum(_COUNT_NBYTES + nbytes for nbytes in skipped)
    if left_nbytes != wanted_nbytes:
        raise UnknownPickle(f"{left_nbytes} bytes of tensors are there, and not {wanted_nbytes}")
    return found


def _storages_nbytes(content: object) -> Collection[int]:
    """Return the sizes of all storages in lists, dicts and the like, in bytes."""
    found: dict[int, int] = {}
    seen = set()
    waiting = [content]
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            with suppress(NotImplementedError, RuntimeError):  # a sparse one has none
                storage = each.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        elif isinstance(each, dict | list | tuple | set) and id(each) not in seen:
            seen.add(id(each))  # it may be in itself
            waiting += each.values() if isinstance(each, dict) else each
    return found.values()


def _require_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is more, or less, than the bytes that a file of safetensors has.

    Raises:
        UnknownPickle: it is one.
    """
    shown = f"its {shorten(name)}"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or vars(tensor):
        raise UnknownPickle(f"{shown} is a {type(tensor).__name__} with more than its elements")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise UnknownPickle(f"{shown} has no plain bytes")
    if tensor.dtype not in _DTYPES:
        raise UnknownPickle(f"{shown} has the dtype {tensor.dtype}, which has no plain bytes")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise UnknownPickle(f"{shown} has elements that lie in the same place")


def _require_strides(name: str, tensor: torch.Tensor, wish: Wish) -> None:
    """Refuse a tensor with strides that the library would keep, and that safetensors have not.

    Raises:
        UnknownPickle: it is one.
    """
    shown = f"its {shorten(name)}"
    is_plain = tensor.is_contiguous()
    is_odd = is_plain and tensor.stride() != torch.empty(tensor.shape, device="meta").stride()
    if not (is_plain or wish.may_be_strided):
        raise UnknownPickle(f"{shown} is transposed, and transformers keeps it so")
    if is_odd and not wish.may_be_odd:
        raise UnknownPickle(f"{shown} has odd strides, and the libraries keep them")


def _write(tensors: dict[str, torch.Tensor], fd: int, *, has_data: bool) -> None:
    """Write a file of safetensors; empties the dict, so that memory is freed on the way."""
    specs = []
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        specs.append(TensorSpec(name, _DTYPES[tensor.dtype], tuple(tensor.shape), begin, end))
    try:
        header = build_header(tuple(specs), {}, _ALIGNED)
    except UnicodeEncodeError as exc:
        raise UnknownPickle("it has a tensor whose name is no text") from exc
    os.ftruncate(fd, len(header) + end)
    write_at(fd, header, 0)
    for spec in specs if has_data else ():
        tensor = tensors.pop(spec.name)
        if tensor.nbytes:
            write_at(fd, _bytes_of(tensor), len(header) + spec.begin)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


if __name__ == "__main__":
    die_with_parent()
    serve_parent(serve)
