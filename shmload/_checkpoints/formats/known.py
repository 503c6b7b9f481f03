"""The table of formats that shmload reads, and which of them a file has."""

import os

from shmload._checkpoints.formats.gguf import GGUF
from shmload._checkpoints.formats.pointer import POINTER
from shmload._checkpoints.formats.pytorch import PYTORCH
from shmload._checkpoints.formats.safetensors import SAFETENSORS
from shmload._checkpoints.header import Format, Header, read_head

FORMATS = (SAFETENSORS, PYTORCH, GGUF)
"""In the order in which they are preferred where a model has weights in several."""

# Weights that are left to the libraries.
_OTHER_SUFFIXES = (".h5", ".msgpack", ".npz", ".onnx")


def read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read and check the header of an open file in any of the formats.

    Args:
        fd: an open descriptor; its position is not moved.
        path: what errors call the file.

    Raises:
        ShardMalformed: the header breaks the format.
        ShardTruncated: the file is shorter than its header says.
        ShardUnreadable: the kernel reports an error.
    """
    return detect_format(fd, path).read_header(fd, path)


def detect_format(fd: int, path: str | os.PathLike[str]) -> Format:
    """Return the format of an open file.

    Raises:
        ShardUnreadable: the kernel reports an error.
    """
    return format_of(path, read_head(fd, path))


def format_of(path: str | os.PathLike[str], head: bytes) -> Format:
    """Return the format that a file's content has, or else the one that its name has.

    Args:
        path: of the file.
        head: its first `HEAD_NBYTES` bytes.

    Returns:
        The first of `FORMATS` if neither is known; its reader then says what is wrong.
    """
    by_content = (known for known in (POINTER, *FORMATS) if known.recognises(head))
    return next(by_content, None) or format_named(os.fspath(path)) or FORMATS[0]


def format_named(name: str) -> Format | None:
    """Return the format that the name of a file says; None if it is none that shmload reads."""
    return next((known for known in FORMATS if name.endswith(known.suffixes)), None)


def is_pickled(name: str) -> bool:
    """Tell whether a file is called like weights in PyTorch's own format."""
    return format_named(name) is PYTORCH


def is_of_weights(name: str) -> bool:
    """Tell whether a file is called like weights, in a format that shmload reads or in another."""
    return format_named(name) is not None or name.endswith(_OTHER_SUFFIXES)


def format_names() -> str:
    """Return the names of all formats, for messages."""
    return " or ".join(known.name for known in FORMATS)
