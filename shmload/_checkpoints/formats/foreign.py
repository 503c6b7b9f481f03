"""Files that shmload does not read: what they are, from their first bytes, and what to do instead.

Guarantee: a file is opened and judged by its content alone; its name may say something else.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from shmload._checkpoints.header import HEAD_NBYTES
from shmload.errors import ShmloadError, WrongFormat

# A name of a zip archive's first member, after its fixed fields (PKWARE's 4.3.7).
_FIRST_MEMBER = slice(30, None)
_CONVERT = (
    "let the library load it, or convert it once: load it with the library and `save_pretrained`, "
    "or `safetensors.torch.save_file`"
)
_UNPACK = "unpack it, and give what is in it"
_AGAIN = "download it again"


class Foreign(msgspec.Struct, frozen=True):
    """A kind of file that shmload does not read."""

    name: str
    """For tables, such as `PyTorch pickle`."""
    remedy: str
    """What to do, for errors."""
    recognises: Callable[[bytes], object]
    """Tells whether a file is of this kind, from its first `HEAD_NBYTES` bytes (or fewer)."""


def _begins(*beginnings: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(beginnings)


def _is_page(head: bytes) -> bool:
    return head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<error"))


def _is_text(head: bytes) -> bool:
    return re.fullmatch(rb"[\t\n\r -~]{9,}", head) is not None


PICKLE = "PyTorch pickle"
"""The name of the kind that `torch.save` writes."""

# The first that fits counts.
_KINDS = (
    Foreign(
        "GGUF",
        "it is big-endian; download the little-endian file",
        _begins(b"GGUF", b"FUGG"),  # with the first of these its own reader reads it
    ),
    Foreign(
        PICKLE,
        _CONVERT,
        # torch.save: a zip archive of NAME/data.pkl; before torch 1.6 several pickles.
        lambda head: (
            (head.startswith(b"PK\3\4") and b"/" in head[_FIRST_MEMBER])
            or re.match(rb"\x80[\2-\5][\x80-\xff}\](c\x58\x4b\x4d]", head)
        ),
    ),
    Foreign(
        "NumPy",
        "convert it once with `safetensors.numpy.save_file`",
        lambda head: (
            head.startswith(b"\x93NUMPY")
            or (head.startswith(b"PK\3\4") and b".npy" in head[_FIRST_MEMBER])
        ),
    ),
    Foreign("HDF5", _CONVERT, _begins(b"\x89HDF\r\n\x1a\n")),
    Foreign(
        "Flax msgpack",
        _CONVERT,
        # A map, whose first key is a text.
        lambda head: re.match(
            rb"([\x81-\x8f]|\xde..|\xdf....)[\xa1-\xbf\xd9\xda][ -~]", head, re.S
        ),
    ),
    Foreign(
        "ONNX",
        "use it with an ONNX runtime",
        # ModelProto: ir_version, then the producer's name or the first operator set.
        lambda head: re.match(rb"\x08[\1-\x20][\x12\x1a:B][\1-\xff]", head),
    ),
    Foreign("git-lfs pointer", "run `git lfs pull`", _begins(b"version https://git-lfs")),
    Foreign(
        "web page",
        "it was saved instead of the weights: log in if the model asks for that (`hf auth login`), "
        f"and {_AGAIN}",
        _is_page,
    ),
    Foreign("zip archive", _UNPACK, _begins(b"PK\3\4")),
    Foreign(
        "compressed file",
        _UNPACK,
        _begins(b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"7z\xbc\xaf", b"BZh", b"Rar!"),
    ),
    Foreign("JSON text", f"give the directory that it is in, or {_AGAIN}", _begins(b'{"', b"{\n")),
    Foreign("text", f"{_AGAIN}; perhaps it is the message of a server", _is_text),
)


def recognise(head: bytes) -> Foreign | None:
    """Return the kind of a file that is not in a format that shmload reads; None if unknown.

    Args:
        head: its first `HEAD_NBYTES` bytes, or fewer.
    """
    return next((kind for kind in _KINDS if kind.recognises(head)), None)


def refuse(fd: int, path: str | os.PathLike[str], cause: ShmloadError) -> ShmloadError:
    """Return the error for a file that its format's reader has refused.

    Args:
        fd: the open file; its position is not moved.
        path: what errors call it.
        cause: the reader's error, which is right if the file's kind is unknown.
    """
    try:
        kind, nbytes = recognise(os.pread(fd, HEAD_NBYTES, 0)), os.fstat(fd).st_size
    except OSError:
        return cause
    return WrongFormat(path, kind.name, nbytes, kind.remedy) if kind else cause


def name_of_kind(path: Path) -> str:
    """Return the name of a file's kind; of its suffix where neither it nor its content says one."""
    try:
        with path.open("rb") as file:
            kind = recognise(file.read(HEAD_NBYTES))
    except OSError:
        kind = None
    return kind.name if kind else f"{path.suffix} file"
