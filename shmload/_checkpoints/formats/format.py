"""What shmload must know of a format of checkpoint files."""

import os
from collections.abc import Callable, Mapping

import msgspec

from shmload._checkpoints.header import Header
from shmload.errors import ShardUnreadable

HEAD_NBYTES = 512
"""How much of a file's front `Format.recognises` gets, in bytes."""


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """A format of checkpoint files."""

    name: str
    """What messages call it, such as `safetensors`."""
    suffixes: tuple[str, ...]
    """Suffixes of its files' names, with the dot; the first belongs to `base_names`."""
    base_names: Mapping[str, str]
    """What a library calls a model's weights, suffix aside, by library; empty if none has a name.

    Where a directory has files of several, the first library's are loaded.
    """
    can_be_linked: bool
    """Whether the libraries map such a file, so that one with the wanted dtypes can stay as it is.

    Else its tensors always go through a segment.
    """
    may_be_unread: bool = False
    """Whether valid files may have something that only the libraries read.

    Such a file is left to them, where a whole model is loaded.
    """
    recognises: Callable[[bytes], bool]
    """Tells whether a file has this format, from its first `HEAD_NBYTES` bytes (or fewer)."""
    read_header: Callable[[int, str | os.PathLike[str]], Header]
    """Reads and checks the header of an open file; the path is what errors call it.

    It neither moves the descriptor's position nor reads tensors' bytes in this process. Raises
    `ShardMalformed`, `ShardTruncated` or `ShardUnreadable`, and nothing else whatever the file
    contains.
    """


def read_head(fd: int, path: str | os.PathLike[str]) -> bytes:
    """Return a file's first `HEAD_NBYTES` bytes, or all if it is shorter.

    Raises:
        ShardUnreadable: the kernel reports an error.
    """
    try:
        return os.pread(fd, HEAD_NBYTES, 0)
    except OSError as exc:
        raise ShardUnreadable(path, exc.strerror or str(exc)) from exc
