"""Reads the headers of PyTorch's files: a zip archive of one pickle and the storages' bytes.

Guarantee: nothing of the file is called in this process, and no tensor's bytes are read in it. What
another reader than torch's own might take for something else is left to the libraries, and so are
the older form without an archive, other classes than tensors, and transposed tensors.
"""

import dataclasses
import functools
import os

from shmload._checkpoints.formats.foreign import PICKLE, refuse
from shmload._checkpoints.formats.tensor_pickle import (
    NoTensors,
    StoredTensor,
    UnknownPickle,
    find_tensors,
    read_pickle,
    shorten,
)
from shmload._checkpoints.formats.zip_archive import (
    BadArchive,
    CutShort,
    Member,
    read_members,
)
from shmload._checkpoints.header import Format, Header, TensorSpec, reading
from shmload._host.fingerprint import Fingerprint
from shmload._wording import format_nbytes
from shmload.errors import PickleUnread, ShardMalformed, ShardTruncated, WrongFormat

# 100,000 tensors have 20 MB. A pickle of nothing but empty lists takes 80 times its size.
_MAX_PICKLE_NBYTES = 64 << 20
# Four names for one embedding give T5-small 1.8 times its bytes.
_MOST_TIMES = 4
_ALWAYS_NBYTES = 64 << 20
_PICKLE = "/data.pkl"
_BYTE_ORDER = "/byteorder"
_VERSIONS = ("/.data/version", "/version")
_IDENTITY = "/.data/serialization_id"
_NUMBERS = ("/.format_version", "/.storage_alignment")
# Of a zip archive's first local header.
_NAME_NBYTES = slice(26, 28)
_NAME_BEGIN = 30
_OF_ONE_MODEL = ".bin"
# diffusers.utils.WEIGHTS_NAME, transformers.utils.WEIGHTS_NAME
_BASE_NAMES = {"diffusers": "diffusion_pytorch_model", "transformers": "pytorch_model"}


def read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read and check the header of an open file.

    Args:
        fd: an open descriptor; its position is not moved.
        path: what errors call the file.

    Raises:
        PickleUnread: it has something that is left to the libraries, tensors that share far more
            bytes than it has, or is damaged.
        ShardMalformed: it is no file of PyTorch.
        ShardTruncated: its end is missing.
        ShardUnreadable: the kernel reports an error.
    """
    with reading(path):
        found = Fingerprint.of(os.fstat(fd))
        may_be_nested = not os.fspath(path).endswith(_OF_ONE_MODEL)
        try:
            header = _read_kept(_File(fd, found, may_be_nested))
        except CutShort:
            raise ShardTruncated(path, None, found.nbytes) from None
        except (BadArchive, UnknownPickle) as exc:
            error = refuse(fd, path, ShardMalformed(path, str(exc), "PyTorch"))
            if isinstance(error, WrongFormat) and error.kind == PICKLE:
                error = PickleUnread(path, found.nbytes, str(exc))
            raise error from None
        return _require_in_proportion(header, path, found.nbytes)


def _require_in_proportion(header: Header, path: str | os.PathLike[str], nbytes: int) -> Header:
    """Leave a file to the libraries whose tensors have far more bytes apart than the file has.

    In a segment, as in safetensors, each tensor has bytes of its own. In this format some may share
    bytes, as tied weights do, and a few bytes may stand for a tensor of any size.
    """
    if header.data_nbytes > max(_MOST_TIMES * nbytes, _ALWAYS_NBYTES):
        apart = format_nbytes(header.data_nbytes)
        raise PickleUnread(path, nbytes, f"its tensors share bytes, and take {apart} apart")
    return header


@dataclasses.dataclass(frozen=True)
class _File:
    """An open file; equal to another if it has the same content."""

    fd: int = dataclasses.field(compare=False)
    found: Fingerprint
    may_be_nested: bool


# A load asks three times: which files it reads, what it does with them, how it lays them out.
@functools.lru_cache(maxsize=16)
def _read_kept(file: _File) -> Header:
    members = read_members(file.fd, file.found.nbytes)
    folder = next(iter(members), "").partition("/")[0]
    pickled = members.get(folder + _PICKLE)
    if pickled is None or pickled.nbytes > _MAX_PICKLE_NBYTES:
        raise NoTensors("it has no data.pkl that describes tensors")
    order = members.get(folder + _BYTE_ORDER)
    if order and os.pread(file.fd, min(order.nbytes, 16), order.begin) != b"little":
        raise UnknownPickle("its numbers are big-endian")
    pickle = read_pickle(os.pread(file.fd, pickled.nbytes, pickled.begin))
    found = find_tensors(pickle, StoredTensor, may_be_nested=file.may_be_nested)
    tensors = tuple(_place(name, tensor, folder, members) for name, tensor in found.items())
    _require_records(file.fd, folder, members)
    return Header(tensors=tensors, metadata=None, data_offset=0)


def _require_records(fd: int, folder: str, members: dict[str, Member]) -> None:
    """Refuse an archive that torch refuses, for what it has beside pickle and storages.

    Raises:
        NoTensors: it has no version, other bytes in the place of a number or text, or members in
            several folders.
    """
    if not any(folder + each in members for each in _VERSIONS):
        raise NoTensors("it has no version")
    for each in (*_VERSIONS, *_NUMBERS):
        member = members.get(folder + each)
        if member and not os.pread(fd, min(member.nbytes, 16), member.begin).strip().isdigit():
            raise NoTensors(f"its {each!r} is no number")
    identity = members.get(folder + _IDENTITY)
    if identity and not os.pread(fd, min(identity.nbytes, 4096), identity.begin).isascii():
        raise NoTensors(f"its {_IDENTITY!r} is no text")
    if not all(name.startswith(f"{folder}/") for name in members):
        raise NoTensors("its members are in several folders")


def _place(name: str, tensor: StoredTensor, folder: str, members: dict[str, Member]) -> TensorSpec:
    member = members.get(f"{folder}/data/{tensor.storage.key}")
    if member is None or member.nbytes != tensor.storage.nbytes:
        raise NoTensors(f"the storage of {shorten(name)} is missing, or has another size")
    return tensor.placed(name, member.begin)


def _recognises(head: bytes) -> bool:
    name_nbytes = int.from_bytes(head[_NAME_NBYTES], "little")
    first = head[_NAME_BEGIN : _NAME_BEGIN + name_nbytes]
    return head.startswith(b"PK\3\4") and first.endswith(_PICKLE.encode())


PYTORCH = Format(
    name="PyTorch",
    suffixes=(_OF_ONE_MODEL, ".pt", ".pth", ".ckpt"),
    base_names=_BASE_NAMES,
    use_safetensors=False,
    can_be_linked=False,
    may_be_unread=True,
    recognises=_recognises,
    read_header=read_header,
)
