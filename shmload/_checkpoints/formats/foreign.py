"""What stands in the place of a file of weights by mistake, told from its first bytes."""

import os

from shmload._wording import format_nbytes
from shmload.errors import ShardMalformed

_POINTER = b"version https://git-lfs"
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")


def refusal(head: bytes, path: str | os.PathLike[str], nbytes: int) -> ShardMalformed | None:
    """Return the error for a file that its format's reader refuses; None if its kind is unknown.

    Args:
        head: its first bytes.
        path: what the error calls it.
        nbytes: its size.
    """
    if head.startswith(_POINTER):
        return ShardMalformed(
            f"{path} is a git-lfs pointer ({format_nbytes(nbytes)}) in the place of a file: run "
            "`git lfs pull`",
            path=path,
        )
    if head.lstrip().lower().startswith(_PAGES):
        return ShardMalformed(
            f"{path} is a web page ({format_nbytes(nbytes)}) that was saved instead of the "
            "weights: log in if the model asks for that (`hf auth login`), and download it again",
            path=path,
        )
    return None
