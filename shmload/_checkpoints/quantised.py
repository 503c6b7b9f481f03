"""Which files have quantised weights, and whether a load can make floats of them.

A cast would make them worthless: a scale, or a table of values, means what it means only in its own
dtype, and the library's quantiser expects the file as it was saved. Plain integers and 8-bit floats
without scales are not quantised in this sense. Blocks are dequantised by their format's package, as
far as the installed one knows their kinds.
"""

import os
from collections.abc import Callable, Collection, Container, Iterable, Mapping

from shmload._checkpoints.dtypes import BLOCKS, FLOATS
from shmload._checkpoints.formats.known import dequantiser
from shmload._checkpoints.header import Header, TensorSpec
from shmload._checkpoints.source import Checkpoint
from shmload.errors import CheckpointError

# As torchao, Nunchaku and others write it into a file or a configuration.
_CONFIG_KEY = "quantization_config"

# The ends of a tensor's name, and of the names that its scales may have.
_SCALES_BY_END: Mapping[str, tuple[str, ...]] = {
    # bitsandbytes in 4 and 8 bits, floats of 8 bits with scales
    "weight": ("weight.absmax", "SCB", "weight_scale", "weight_scale_inv", "scale_weight"),
    "_data": ("_scale",),  # quanto
    "_qdata": ("_scale",),  # torchao
    "qweight": ("scales", "wscales"),  # GPTQ and AWQ, Nunchaku
    "weight_packed": ("weight_scale",),  # compressed-tensors
}
_WIDE_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
_PACKED = (FLOATS - _WIDE_FLOATS) | {"I8", "U8", "I32", "U32", "F4", "F6_E2M3", "F6_E3M2"}


def are_quantised(headers: Collection[Header]) -> bool:
    """Tell whether a model's tensors are quantised, from the headers of its files.

    Args:
        headers: of all its files; the scales of a weight may be in another one.
    """
    if any(_CONFIG_KEY in (header.metadata or {}) for header in headers):
        return True
    tensors = [tensor for header in headers for tensor in header.tensors]
    packed = [tensor.name for tensor in tensors if tensor.dtype in _PACKED]
    if not packed:
        return False
    names = {tensor.name for tensor in tensors}
    return any(_has_scales(name, names) for name in packed)


def says_quantised(checkpoint: Checkpoint) -> bool:
    """Tell whether a model's configuration says that its weights are quantised."""
    return bool(checkpoint.config.get(_CONFIG_KEY))


def _has_scales(name: str, names: Container[str]) -> bool:
    return any(
        name.endswith(end) and f"{name.removesuffix(end)}{scale}" in names
        for end, scales in _SCALES_BY_END.items()
        for scale in scales
    )


def require_dequantised(
    path: str | os.PathLike[str],
    tensors: Iterable[TensorSpec],
    dtype_of: Callable[[TensorSpec], str],
) -> None:
    """Check that workers can dequantise the tensors of a file that are wanted as floats.

    Args:
        path: of the file, for errors.
        tensors: of the file.
        dtype_of: the dtype of each tensor in the segment.

    Raises:
        LibraryError: the package for that is not installed.
        CheckpointError: it does not know a kind.
    """
    first: dict[str, str] = {}
    for tensor in tensors:
        if tensor.dtype in BLOCKS and dtype_of(tensor) != tensor.dtype:
            first.setdefault(tensor.dtype, tensor.name)
    for kind, name in first.items():
        try:
            dequantiser(kind, path)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: its tensor {name!r} has the kind {kind}, which the installed gguf "
                "package does not dequantise; update the package, load without dtype to get the "
                "blocks as they are, or download the model in another kind",
                path=path,
            ) from None
