"""GGUF files, which may have tensors quantised in blocks.

The gguf package says where the tensors lie (`described`), and makes floats of blocks.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

from shmload._checkpoints.dtypes import BLOCKS
from shmload._checkpoints.formats.described import NotDescribed, Unread, read_described
from shmload._checkpoints.header import Format, Header, Quants, TensorSpec, reading
from shmload.errors import ShardMalformed, needing

_INSTALL = "shmload[gguf]"


def read_header(fd: int, path: str | os.PathLike[str]) -> Header:
    """Read the header of an open file.

    Args:
        fd: an open descriptor; its position is not moved.
        path: what errors call it.

    Raises:
        LibraryError: the gguf package is not installed.
        ShardMalformed: the package refuses it.
        ShardUnreadable: the kernel reports an error.
    """
    with reading(path):
        try:
            return read_described(fd, "gguf", "gguf")
        except NotDescribed as exc:
            raise ShardMalformed(
                f"{path} is not a valid GGUF file: {exc}; download it again", path=path
            ) from None


def _dequantiser(kind: str, path: str | os.PathLike[str]) -> Callable[[Any], Any]:
    """Return what makes float32 of a row of blocks; imports the gguf package, which takes 0.1 s.

    Args:
        kind: ggml's name of the kind.
        path: of the file, for errors.

    Raises:
        LibraryError: the package is not installed.
        NotImplementedError: it does not dequantise the kind.
    """
    with needing("gguf", f"dequantising {path}", _INSTALL):
        import gguf
    import numpy as np

    try:
        number = gguf.GGMLQuantizationType[kind]
        gguf.dequantize(np.zeros((1, BLOCKS[kind][1]), np.uint8), number)
    except KeyError as exc:  # an older package does not even have its name
        raise NotImplementedError from exc
    return lambda blocks: gguf.dequantize(blocks, number)


def _parameter(spec: TensorSpec, blocks: Any, path: str | os.PathLike[str]) -> Any:
    """Return what diffusers' `load_gguf_checkpoint` makes of a tensor.

    Raises:
        LibraryError: diffusers needs the gguf package for it.
        ValueError: as there, of a kind that it does not know.
    """
    with needing("gguf", f"a quantised model of {path}", _INSTALL):
        import gguf
    from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFParameter

    kind = gguf.GGMLQuantizationType[spec.dtype]
    if kind not in SUPPORTED_GGUF_QUANT_TYPES:
        names = ", ".join(each.name for each in SUPPORTED_GGUF_QUANT_TYPES)
        raise ValueError(
            f"{spec.name} has a quantization type: {kind.name}, which diffusers does not support; "
            f"it supports {names}. Give a dtype and no quantization_config to load it as floats"
        )
    return GGUFParameter(blocks, quant_type=kind)


GGUF = Format(
    name="GGUF",
    suffixes=(".gguf",),
    base_names={},  # a library is told the name
    argument="gguf_file",
    can_be_linked=False,
    quants=Quants(
        kinds=BLOCKS.keys(),
        config="GGUFQuantizationConfig",
        dequantiser=_dequantiser,
        parameter=_parameter,
    ),
    recognises=lambda head: head.startswith(b"GGUF"),
    read_header=read_header,
)


# In the process that describes --------------------------------------------------------------------


def describe(path: str) -> Iterator[TensorSpec]:
    """Yield the tensors of a file; `shmload._checkpoints.formats.described` calls this.

    Raises:
        Unread: its numbers are big-endian.
        Exception: any error of the package.
    """
    import gguf

    found = gguf.GGUFReader(path)
    if found.byte_order != "I":
        raise Unread("its numbers are big-endian: convert it with `gguf-convert-endian`")
    for tensor in found.tensors:
        # The last dimension comes first.
        shape = tuple(map(int, reversed(tensor.shape)))
        begin = tensor.data_offset
        yield TensorSpec(
            tensor.name, tensor.tensor_type.name, shape, begin, begin + int(tensor.n_bytes)
        )
