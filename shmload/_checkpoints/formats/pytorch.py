"""Reads the headers of PyTorch's files: a zip archive of one pickle and the storages' bytes.

Guarantee: nothing of the file is called, and no tensor's bytes are read. What another reader than
torch's own might take for something else is refused, and left to the libraries: the older form
without an archive, other classes than tensors, transposed tensors.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

from shmload._checkpoints.formats.foreign import PICKLE, refuse
from shmload._checkpoints.formats.format import Format
from shmload._checkpoints.formats.tensor_pickle import (
    StoredTensor,
    UnknownPickle,
    read_pickle,
    shorten,
)
from shmload._checkpoints.formats.zip_archive import (
    BadArchive,
    CutShort,
    Member,
    read_members,
)
from shmload._checkpoints.header import Header, TensorSpec
from shmload.errors import (
    PickleUnread,
    ShardMalformed,
    ShardTruncated,
    ShardUnreadable,
    ShmloadError,
    WrongFormat,
)

# 100,000 tensors have 20 MB. A pickle of nothing but empty lists takes 80 times its size.
_MAX_PICKLE_NBYTES = 64 << 20
_PICKLE = "/data.pkl"
_BYTE_ORDER = "/byteorder"
# Of a zip archive's first local header.
_NAME_NBYTES = slice(26, 28)
_NAME_BEGIN = 30
# A whole pipeline in one file has its tensors under this key; diffusers looks there, too.
_NESTED = "state_dict"
_MAX_DEPTH = 4
_OF_ONE_MODEL = ".bin"
# An IP-Adapter has two state dicts. Its loader in diffusers joins these names and those of the
# tensors with a dot, if the file is in safetensors.
_IP_ADAPTER = {"image_proj", "ip_adapter"}


def read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read and check the header of an open file.

    Raises:
        PickleUnread: it has something that is left to the libraries, or is damaged.
        ShardMalformed: it is no file of PyTorch.
        ShardTruncated: its end is missing.
        ShardUnreadable: the kernel reports an error.
    """
    try:
        found = os.fstat(fd)
        is_model = os.fspath(path).endswith(_OF_ONE_MODEL)
        stamp = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        try:
            return _read_kept(_File(fd, found.st_size, stamp, may_be_nested=not is_model))
        except CutShort:
            raise ShardTruncated(path, None, found.st_size) from None
        except (BadArchive, UnknownPickle) as exc:
            error = refuse(fd, path, ShardMalformed(path, str(exc), "PyTorch"))
            is_pickle = isinstance(error, WrongFormat) and error.kind == PICKLE
            raise PickleUnread(path, found.st_size, str(exc)) if is_pickle else error from None
    except OSError as exc:
        if isinstance(exc, ShmloadError):
            raise
        raise ShardUnreadable(path, exc.strerror or str(exc)) from exc


@dataclasses.dataclass(frozen=True)
class _File:
    """An open file; equal to another if it has the same content."""

    fd: int = dataclasses.field(compare=False)
    nbytes: int
    stamp: tuple[int, ...]
    may_be_nested: bool


# A load asks three times: which files it reads, what it does with them, how it lays them out.
@functools.lru_cache(maxsize=16)
def _read_kept(file: _File) -> Header:
    members = read_members(file.fd, file.nbytes)
    folder = next(iter(members), "").partition("/")[0]
    pickled = members.get(folder + _PICKLE)
    if pickled is None or pickled.nbytes > _MAX_PICKLE_NBYTES:
        raise UnknownPickle("it has no data.pkl that describes tensors")
    order = members.get(folder + _BYTE_ORDER)
    if order and os.pread(file.fd, min(order.nbytes, 16), order.begin) != b"little":
        raise UnknownPickle("its numbers are big-endian")
    found: Any = read_pickle(os.pread(file.fd, pickled.nbytes, pickled.begin))
    for _ in range(_MAX_DEPTH):  # a dict may be in itself
        if file.may_be_nested and isinstance(found.get(_NESTED), dict):
            found = found[_NESTED]
    if found.keys() == _IP_ADAPTER:
        found = {name: each for part in found for name, each in _with_prefix(part, found[part])}
    tensors = tuple(_place(name, tensor, folder, members) for name, tensor in found.items())
    return Header(tensors=tensors, metadata=None, data_offset=0)


def _with_prefix(prefix: str, part: object) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a state dict in another, with the names that they have in one."""
    if not isinstance(part, dict) or not all(isinstance(name, str) for name in part):
        raise UnknownPickle(f"its {prefix!r} is no dict of tensors with names")
    for name, tensor in part.items():
        yield f"{prefix}.{name}", tensor


def _place(name: object, tensor: object, folder: str, members: dict[str, Member]) -> TensorSpec:
    # In a segment's header that name means something else.
    if not isinstance(name, str) or name == "__metadata__" or not isinstance(tensor, StoredTensor):
        raise UnknownPickle(f"its {shorten(name)} is no tensor with a name")
    member = members.get(f"{folder}/data/{tensor.storage.key}")
    if member is None or member.nbytes != tensor.storage.nbytes:
        raise UnknownPickle(f"the storage of {shorten(name)} is missing, or has another size")
    return tensor.placed(name, member.begin)


def _recognises(head: bytes) -> bool:
    name_nbytes = int.from_bytes(head[_NAME_NBYTES], "little")
    first = head[_NAME_BEGIN : _NAME_BEGIN + name_nbytes]
    return head.startswith(b"PK\3\4") and first.endswith(_PICKLE.encode())


PYTORCH = Format(
    name="PyTorch",
    suffixes=(_OF_ONE_MODEL, ".pt", ".pth", ".ckpt"),
    # diffusers.utils.WEIGHTS_NAME, transformers.utils.WEIGHTS_NAME
    base_names={"diffusers": "diffusion_pytorch_model", "transformers": "pytorch_model"},
    can_be_linked=False,
    may_be_unread=True,
    recognises=_recognises,
    read_header=read_header,
)
