"""A file's tensors, as torch's restricted unpickler makes them, written as a file of safetensors.

Guarantee: the file is never unpickled in another way. Only `workers.unpickle` imports this, and
torch with it.
"""

import json
import os
import re
from contextlib import nullcontext, suppress
from typing import Any

import torch

from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES
from shmload._checkpoints.formats.tensor_pickle import UnknownPickle, find_tensors, shorten
from shmload._checkpoints.formats.unpickled import (
    MAX_WHY,
    Answer,
    Failed,
    Refused,
    Unpickle,
    Unpickled,
    Wish,
    is_archive,
)
from shmload._host.limits import is_lack_of_memory
from shmload._host.shm import write_at
from shmload.errors import CapacityError

# A file begins with the header's length, then the header. Their sizes are multiples of _ALIGNED.
_LENGTH_NBYTES = 8
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


def unpickle_to(target_fd: int, fd: int, request: Unpickle) -> Answer:
    """Write the tensors of a file into another; return what to answer.

    Args:
        target_fd: an empty file, open to write.
        fd: the file to unpickle.
        request: what is wanted of it.
    """
    try:
        tensors = _plain_tensors(fd, request)
        _write(tensors, target_fd, has_data=request.has_data)
    except UnknownPickle as exc:
        return Refused(str(exc)[:MAX_WHY])
    except Exception as exc:  # outermost: the one who asks must learn of any error
        lacks_memory = isinstance(exc, CapacityError) or is_lack_of_memory(exc)
        return Failed(f"{type(exc).__name__}: {exc}"[:MAX_WHY], lacks_memory)
    return Unpickled()


def _plain_tensors(fd: int, request: Unpickle) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, by name.

    Raises:
        UnknownPickle: torch refuses it, or it has something that has no place in safetensors.
        MemoryError: there is no memory for it.
    """
    content, rest_nbytes = _load(fd, has_data=request.has_data)
    tensors = find_tensors(content, torch.Tensor, may_be_nested=request.wish.may_be_nested)
    for name, tensor in tensors.items():
        _require_plain(name, tensor)
        _require_strides(name, tensor, request.wish)
    if rest_nbytes is not None:
        is_read = request.has_data or _skip_data is nullcontext
        _require_whole({} if is_read else content, rest_nbytes)
    return tensors


def _load(fd: int, *, has_data: bool) -> tuple[Any, int | None]:
    """Return what torch's restricted unpickler makes of a file, and how much of it is left unread.

    Args:
        fd: the file.
        has_data: read the storages of a file of the older form; if not, they have any bytes.

    Returns:
        The second is in bytes; None for an archive, which is mapped.

    Raises:
        UnknownPickle: torch refuses it.
        MemoryError: there is no memory for it.
    """
    path = f"/proc/self/fd/{fd}"
    try:
        if is_archive(fd):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True), None
        with open(path, "rb") as file, nullcontext() if has_data else _skip_data():
            found = torch.load(file, map_location="cpu", weights_only=True)
            return found, os.fstat(fd).st_size - file.tell()
    except Exception as exc:  # a damaged file may raise anything
        if is_lack_of_memory(exc):
            raise
        named = _NAME.search(str(exc))
        if named:
            raise UnknownPickle(f"torch refuses the name {shorten(named[1])[1:-1]} in it") from exc
        said = " ".join(str(exc).split())
        raise UnknownPickle(f"torch refuses it: {type(exc).__name__}: {said}") from exc


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


def _require_whole(content: object, nbytes: int) -> None:
    """Refuse a file of the older form of which torch would not read all storages, or nothing else.

    A list says which storages follow the pickles. One that is missing there would have any bytes.

    Args:
        content: all that has storages which torch has not read.
        nbytes: how much it has left unread, in bytes.

    Raises:
        UnknownPickle: it is cut short, or damaged.
    """
    wanted = sum(_COUNT_NBYTES + storage for storage in _storages(content).values())
    if wanted != nbytes:
        raise UnknownPickle(f"{nbytes} bytes of tensors are there, and not {wanted}")


def _storages(content: object) -> dict[int, int]:
    """Return the sizes of all storages in lists, dicts and the like, in bytes, by their address."""
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
    return found


def _write(tensors: dict[str, torch.Tensor], fd: int, *, has_data: bool) -> None:
    """Write a file of safetensors; empties the dict, so that memory is freed on the way."""
    entries: dict[str, object] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": [*tensor.shape],
            "data_offsets": [begin, end],
        }
    try:
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as exc:
        raise UnknownPickle("it has a tensor whose name is no text") from exc
    header += b" " * (-len(header) % _ALIGNED)
    os.ftruncate(fd, _LENGTH_NBYTES + len(header) + end)
    write_at(fd, len(header).to_bytes(_LENGTH_NBYTES, "little") + header, 0)
    offset = _LENGTH_NBYTES + len(header)
    while tensors and has_data:
        tensor = tensors.pop(next(iter(tensors)))
        nbytes = tensor.nbytes
        if nbytes:
            write_at(fd, _bytes_of(tensor), offset)
        offset += nbytes


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data
