"""PyTorch's files: a zip archive of one pickle and the storages' bytes.

torch itself says where the tensors lie (`described`); workers then read their bytes from the file.

Guarantee: nothing of the file is unpickled in this process. What has other things than plain
tensors with names, or tensors whose elements do not lie next to each other, is left to the
libraries, and so is the older form without an archive.
"""

import contextlib
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from shmload._checkpoints.dtypes import TORCH_NAMES
from shmload._checkpoints.formats.described import (
    NotDescribed,
    Unread,
    describe_all,
    read_described,
)
from shmload._checkpoints.header import (
    Format,
    Header,
    TensorSpec,
    read_head,
    reading,
    refusal,
    truncated,
)
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source
from shmload._wording import format_nbytes
from shmload.errors import ShardMalformed

_ARCHIVE, _ARCHIVE_END = b"PK\3\4", b"PK\5\6"
# The last record of an archive, and the longest comment behind it.
_END_NBYTES = 22 + (1 << 16)
_PICKLE = "/data.pkl"
# In a zip archive's first local header: the length of its file's name, and where the name begins.
_NAME_NBYTES = slice(26, 28)
_NAME_BEGIN = 30
_ASKED = ("pytorch", "torch")


def read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read the header of an open file.

    Args:
        fd: an open descriptor; its position is not moved.
        path: what errors call it.

    Raises:
        ShardMalformed: it is no file of PyTorch, is damaged, or is left to the libraries.
        ShardTruncated: its end is missing.
        ShardUnreadable: the kernel reports an error.
    """
    with reading(path):
        nbytes = os.fstat(fd).st_size
        head = read_head(fd, path)
        if head.startswith(b"\x80"):
            raise _unread(path, nbytes, "it has the form of torch before 1.6")
        if not head.startswith(_ARCHIVE):
            raise refusal(head, path, nbytes) or ShardMalformed(
                f"{path} is not a valid PyTorch file: it does not begin with a zip archive; "
                "download it again",
                path=path,
            )
        if _ARCHIVE_END not in os.pread(fd, _END_NBYTES, max(0, nbytes - _END_NBYTES)):
            raise truncated(path, None, nbytes)
        try:
            return read_described(fd, *_ASKED)
        except NotDescribed as exc:
            raise _unread(path, nbytes, str(exc)) from None


def _unread(path: str | os.PathLike[str], nbytes: int, why: str) -> ShardMalformed:
    return ShardMalformed(
        f"{path} is a PyTorch pickle ({format_nbytes(nbytes)}) that shmload does not read: {why}; "
        "let the library load it, or convert it once: load it with the library and "
        "`save_pretrained`, or `safetensors.torch.save_file`",
        path=path,
        why=why,
    )


def ask_for(paths: Collection[Path]) -> None:
    """Have torch describe some files in one process, so that `read_header` knows them.

    Args:
        paths: of the files. Others than archives are left out.

    Raises:
        ShardUnreadable: one cannot be opened or read.
    """
    with contextlib.ExitStack() as opened:
        fds = []
        for path in paths:
            fd = opened.enter_context(Descriptor(open_source(path))).fd
            if recognises(read_head(fd, path)):
                fds.append(fd)
        if fds:
            describe_all(fds, *_ASKED)


def recognises(head: bytes) -> bool:
    """Tell whether a file's first bytes are those of an archive that torch has written."""
    name_nbytes = int.from_bytes(head[_NAME_NBYTES], "little")
    first = head[_NAME_BEGIN : _NAME_BEGIN + name_nbytes]
    return head.startswith(_ARCHIVE) and first.endswith(_PICKLE.encode())


PYTORCH = Format(
    name="PyTorch",
    suffixes=(".bin", ".pt", ".pth", ".ckpt"),
    # diffusers.utils.WEIGHTS_NAME, transformers.utils.WEIGHTS_NAME
    base_names={"diffusers": "diffusion_pytorch_model", "transformers": "pytorch_model"},
    use_safetensors=False,
    can_be_linked=False,
    may_be_unread=True,
    ask_for=ask_for,
    recognises=recognises,
    read_header=read_header,
)


# In the process that describes --------------------------------------------------------------------

# A whole pipeline in one file has its tensors under this key; diffusers looks there, too.
_NESTED = "state_dict"
# A file may have a dict in itself.
_MAX_DEPTH = 4
# An IP-Adapter has two state dicts. Its loader in diffusers joins these names and those of the
# tensors with a dot, if the file is in safetensors.
_IP_ADAPTER = {"image_proj", "ip_adapter"}


def describe(path: str) -> Iterator[TensorSpec]:
    """Yield the tensors of a file; `shmload._checkpoints.formats.described` calls this.

    Raises:
        Unread: it is left to the libraries.
        Exception: any error of torch.
    """
    import torch

    places = _places(path)
    dtypes = {getattr(torch, name, None): dtype for dtype, name in TORCH_NAMES.items()}
    try:
        found = torch.load(path, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as exc:
        named = re.search(r"(?i)global (\S{1,200})", str(exc))
        raise Unread(f"torch does not unpickle {named[1] if named else 'it'}") from exc
    for name, tensor in _named(found).items():
        if not isinstance(name, str):
            raise Unread(f"its {name!r:.200} is no text")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise Unread(f"its {name!r:.200} is no tensor")
        is_plain = tensor.layout is torch.strided and tensor.dtype in dtypes
        if not is_plain or tensor.is_conj() or tensor.is_neg() or vars(tensor):
            raise Unread(f"its {name!r:.200} is no plain tensor")
        if not tensor.is_contiguous():
            raise Unread(f"the elements of its {name!r:.200} do not lie next to each other")
        begin = 0
        if tensor.nbytes:
            storage = tensor.untyped_storage()
            begin = getattr(storage, "_checkpoint_offset", -1)
            if places.get(begin) != storage.nbytes():
                raise Unread(f"torch {torch.__version__} does not say where its {name!r:.200} lies")
            begin += tensor.storage_offset() * tensor.element_size()
        shape = tuple(tensor.shape)
        yield TensorSpec(name, dtypes[tensor.dtype], shape, begin, begin + tensor.nbytes)


def _places(path: str) -> dict[int, int]:
    """Return the size of each stored member of an archive by the place of its bytes.

    torch may compute a place from what its own writer does, and another program has written it.

    Raises:
        Unread: its members are compressed, or its numbers are big-endian.
    """
    with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        found = {}
        for member in archive.infolist():
            if member.compress_type != zipfile.ZIP_STORED:
                raise Unread(f"its {member.filename!r:.200} is compressed")
            is_order = member.filename.endswith("/byteorder")
            if is_order and archive.read(member) != b"little":
                raise Unread("its numbers are big-endian")
            file.seek(member.header_offset + _NAME_NBYTES.start)
            lengths = struct.unpack("<2H", file.read(4))
            found[member.header_offset + _NAME_BEGIN + sum(lengths)] = member.file_size
    return found


def _named(found: Any) -> Mapping[Any, Any]:
    """Return the tensors of a state dict by the names that they have in safetensors."""
    for _ in range(_MAX_DEPTH):
        if isinstance(found, dict) and isinstance(found.get(_NESTED), dict):
            found = found[_NESTED]
    if not isinstance(found, dict):
        raise Unread("it holds no dict of tensors")
    if found.keys() != _IP_ADAPTER:
        return found
    return {
        f"{prefix}.{name}": each for prefix, part in found.items() for name, each in part.items()
    }
