"""What stands in the place of a file of weights by mistake, told from its first bytes."""

import os

from shmload.errors import WrongFormat

_POINTER = b"version https://git-lfs"
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")


def refusal(head: bytes, path: str | os.PathLike[str], nbytes: int) -> WrongFormat | None:
    """Return the error for a file that its format's reader refuses; None if its kind is unknown.

    Args:
        head: its first bytes.
        path: what the error calls it.
        nbytes: its size.
    """
    if head.startswith(_POINTER):
        return WrongFormat(path, "git-lfs pointer", nbytes, "run `git lfs pull`")
    if head.lstrip().lower().startswith(_PAGES):
        remedy = (
            "it was saved instead of the weights: log in if the model asks for that "
            "(`hf auth login`), and download it again"
        )
        return WrongFormat(path, "web page", nbytes, remedy)
    return None
