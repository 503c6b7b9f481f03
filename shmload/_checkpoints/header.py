"""What the header of a file of weights says, and what shmload must know of the file's format."""

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.dtypes import BLOCKS, NBITS
from shmload._host.files import unreadable
from shmload._wording import format_nbytes
from shmload.errors import ShardMalformed, ShardTruncated, ShmloadError

# The limit of safetensors itself (tensor.rs, MAX_HEADER_SIZE).
MAX_HEADER_NBYTES = 100_000_000
"""Size of the largest header that is read, in bytes, in any format."""
HEAD_NBYTES = 512
"""How much of a file's front `Format.recognises` gets, in bytes."""
# torch's limit.
_MAX_RANK = 64
_MAX_COUNT = 1 << 59

# What stands in the place of a file of weights by mistake, by its first bytes.
_POINTER = b"version https://git-lfs"
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")


class TensorSpec(msgspec.Struct, frozen=True, gc=False):
    """Where one tensor's bytes lie in its file, and what they are."""

    name: str
    dtype: str
    """Safetensors name, such as `BF16`, or ggml's of a kind in `BLOCKS`."""
    shape: tuple[int, ...]
    begin: int
    """Offset of the first byte from `Header.data_offset`, in bytes."""
    end: int
    """Offset behind the last byte, in bytes."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


def wrong_in(tensor: TensorSpec) -> str:
    """Return why a tensor cannot be as it is described, wherever it lies; empty if it can."""
    name, shape = f"tensor {tensor.name!r}", tensor.shape
    if len(shape) > _MAX_RANK:
        return f"{name} has {len(shape)} dimensions"
    if tensor.name == "__metadata__":  # in a segment's header that means something else
        return "it has a tensor named __metadata__"
    if tensor.dtype in BLOCKS:
        elements, nbytes = BLOCKS[tensor.dtype]
        if not shape or shape[-1] % elements:
            return f"{name} of shape {shape} is not one of whole {tensor.dtype} blocks"
        nbits = 8 * nbytes * math.prod(shape) // elements
    elif tensor.dtype in NBITS:
        nbits = NBITS[tensor.dtype] * math.prod(shape)
    else:
        return f"{name} has the unknown dtype {tensor.dtype!r}"
    if nbits != 8 * tensor.nbytes:
        return f"{name} of shape {shape} does not have {tensor.nbytes} bytes"
    # Without elements, too: torch computes the strides.
    if math.prod(filter(None, shape)) > _MAX_COUNT:
        return f"{name} has the shape {shape}"
    return ""


class Header(msgspec.Struct, frozen=True, kw_only=True, weakref=True):
    """A parsed header.

    Its format's reader has checked it: every tensor lies inside the file and has as many bytes as
    its dtype and shape say. Tensors may come in any order, with gaps between them, and may share
    bytes, unless the format is stricter.
    """

    tensors: tuple[TensorSpec, ...]
    metadata: dict[str, str] | None
    """What the file says beside its tensors; None if it has no place for that."""
    data_offset: int
    """What tensors' offsets count from, in bytes of the file."""

    @property
    def data_nbytes(self) -> int:
        """Size of all tensors together, in bytes."""
        return sum(tensor.end - tensor.begin for tensor in self.tensors)


class Quants(msgspec.Struct, frozen=True, kw_only=True):
    """What is done with tensors that are quantised in blocks."""

    kinds: Collection[str]
    """Names of the kinds of blocks, which stand in place of dtypes."""
    config: str
    """The class of the libraries' `quantization_config` by which a model keeps its blocks."""
    dequantiser: Callable[[str, str | os.PathLike[str]], Callable[[Any], Any]]
    """Returns what makes float32 of a row of blocks of a kind; the path is what errors call.

    Raises `LibraryError`, or `NotImplementedError` for a kind that the library does not know.
    """
    parameter: Callable[[TensorSpec, Any, str | os.PathLike[str]], Any]
    """Makes of a tensor of blocks, as bytes, what the libraries' own reader makes of it.

    Raises `LibraryError`, or `ValueError` as that reader does.
    """


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
    use_safetensors: bool | None = None
    """The value of the libraries' argument of this name that asks for it; None if none does."""
    argument: str = ""
    """The libraries' argument that names a file of it; empty if there is none."""
    can_be_linked: bool
    """Whether the libraries map such a file, so that one with the wanted dtypes can stay as it is.

    Else its tensors always go through a segment.
    """
    may_be_unread: bool = False
    """Whether valid files may have something that only the libraries read.

    Such a file is left to them, where a whole model is loaded.
    """
    ask_for: Callable[[Collection[Path]], None] | None = None
    """Has a library describe some files at once, before `read_header` is called for each."""
    quants: Quants | None = None
    """How its tensors are quantised in blocks; None if they are not."""
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
    with reading(path):
        return os.pread(fd, HEAD_NBYTES, 0)


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Read a file in the block.

    Raises:
        ShardUnreadable: the kernel reports an error.
    """
    try:
        yield
    except ShmloadError:  # some are OSErrors, too
        raise
    except OSError as exc:
        raise unreadable(path, exc.strerror or str(exc), exc.errno) from exc


def truncated(path: str | os.PathLike[str], wanted: int | None, got: int) -> ShardTruncated:
    """Return the error for a file that is too short; its arguments are those of the error."""
    expected = "its end is missing" if wanted is None else f"{wanted} bytes expected"
    return ShardTruncated(
        f"{path} is truncated: {expected}, {got} bytes are there; download it again",
        path=path,
        wanted=wanted,
        got=got,
    )


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
