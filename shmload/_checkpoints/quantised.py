"""Which files have quantised weights: a cast would make them worthless.

A scale, or a table of values, means what it means only in its own dtype, and the library's
quantiser expects the file as it was saved. Plain integers and 8-bit floats without scales are not
quantised in this sense.
"""

from collections.abc import Collection, Container, Mapping

from shmload._checkpoints.dtypes import FLOATS
from shmload._checkpoints.header import Header
from shmload._checkpoints.resolve import Checkpoint

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
