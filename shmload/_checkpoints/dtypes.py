"""Names and sizes of tensor dtypes, without torch.

Inside shmload a dtype is its safetensors name (`"BF16"`); users give torch's (`torch.bfloat16` or
`"bfloat16"`). A quantised kind is a dtype of a shard, by ggml's name (`Q4_K`). Its
values lie in blocks, and a block is dequantised as a whole. A segment has the blocks as `U8`, or
floats.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shmload._wording import nearest
from shmload.errors import ArgumentError, UnknownDtype

# Bits per element, and torch's name where torch has one, of every dtype that safetensors 0.8 knows
# (github.com/huggingface/safetensors, safetensors/src/tensor.rs, `Dtype::bitsize`).
_DTYPES = {
    "BOOL": (8, "bool"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, ""),
    "F6_E3M2": (6, ""),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}
NBITS = {name: nbits for name, (nbits, _) in _DTYPES.items()}
"""Bits per element, by dtype."""
TORCH_NAMES = {name: torch_name for name, (_, torch_name) in _DTYPES.items() if torch_name}
"""torch's names of the dtypes that it has."""

# What `torch.is_floating_point` says of a dtype, and the conversions cover.
FLOATS = frozenset(
    name for name, nbits in NBITS.items() if name.startswith(("F", "BF")) and nbits >= 8
)

# Floats whose every value float32 holds exactly.
WITHIN_F32 = FLOATS - {"F64", "F32"}

# GGML_QUANT_SIZES of the gguf package 0.19, which takes 0.1 s to import; a test compares them.
BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 40),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
    "Q1_0": (128, 18),
}
"""Elements and bytes of a block, by ggml's name of its kind."""


LARGEST_BLOCK = 256
"""The most elements that a block has; the other sizes divide it."""

RAW_BLOCKS = "U8"
"""The dtype of blocks in a segment."""

AUTO = "auto"
"""In place of a dtype: the checkpoint's own."""

# The usual ones first: errors list them in this order.
_USUAL = ("BF16", "F16", "F32", "F64")
_BY_TORCH_NAME = {TORCH_NAMES[dtype]: dtype for dtype in (*_USUAL, *sorted(FLOATS - {*_USUAL}))}


def dtype_names() -> tuple[str, ...]:
    """Return torch's names of the dtypes that weights can be converted to, the usual first."""
    return tuple(_BY_TORCH_NAME)


_SHORT_NAMES = {"fp64": "F64", "fp32": "F32", "fp16": "F16", "bf16": "BF16", "half": "F16"}
_SHORT_NAMES |= {"float": "F32", "double": "F64", "float8_e4m3": "F8_E4M3"}


def dtype_by_component(texts: Sequence[str]) -> str | dict[str, str] | None:
    """Read dtypes as a command line gives them: `bfloat16`, or `vae=float32` for one component.

    Returns:
        What `dtype` takes: None for no text, a name for all, or a dict by component.

    Raises:
        ArgumentError: one is given twice.
    """
    by_component = {}
    for text in texts:
        component, separator, dtype = text.rpartition("=")
        name = component if separator else "default"
        if name in by_component:
            raise ArgumentError(f"the dtype of {name!r} is given twice")
        by_component[name] = dtype
    if set(by_component) <= {"default"}:
        return by_component.get("default")
    return by_component


def is_auto(dtype: object) -> bool:
    """Tell whether a dtype is the name for those of the checkpoints."""
    return isinstance(dtype, str) and dtype == AUTO


def parse_dtype(dtype: object) -> str:
    """Return the safetensors name of a floating dtype given in any of the usual ways.

    Args:
        dtype: a `torch.dtype`, or its name with or without `torch.`, or `bf16`, `fp16`, ...

    Raises:
        UnknownDtype: it is not a floating dtype that torch has.
    """
    # str(torch.bfloat16) is "torch.bfloat16": one way for objects and names, and no import.
    name = str(dtype).removeprefix("torch.")
    found = _BY_TORCH_NAME.get(name) or _SHORT_NAMES.get(name.lower())
    if found is None and name in FLOATS:
        found = name
    if found is None:
        known = [*_BY_TORCH_NAME, AUTO]
        near = nearest(name, [*known, "bf16", "fp16", "fp32"])
        raise UnknownDtype(f"unknown dtype {dtype!r}; use one of {', '.join(known)}{near}")
    return found


def torch_names(dtype: object) -> Any:
    """Return torch's names in place of dtypes, alone or in a dict by component; `auto` stays.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    if isinstance(dtype, Mapping):
        return {str(name): torch_names(each) for name, each in sorted(dtype.items())}
    if dtype is None or is_auto(dtype):
        return dtype
    return TORCH_NAMES[parse_dtype(dtype)]


def unit_nbytes(source: str, target: str) -> tuple[int, int]:
    """Return the size of what is converted at a time, an element or a block, in bytes.

    Args:
        source: dtype in the shard; at least 8 bits.
        target: dtype in the segment, likewise.

    Returns:
        The size in the shard, and in the segment.
    """
    if source in BLOCKS:
        count, nbytes = BLOCKS[source]
        return nbytes, count * NBITS[target] // 8
    return NBITS[source] // 8, NBITS[target] // 8


def converted_nbytes(nbytes: int, source: str, target: str) -> int:
    """Return the size of a tensor after its conversion, in bytes; the same if there is none."""
    if source == target:
        return nbytes
    before, after = unit_nbytes(source, target)
    return nbytes // before * after


def shape_in_bytes(kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a quantised tensor's blocks as bytes; the last dimension has the rows."""
    count, nbytes = BLOCKS[kind]
    return (*shape[:-1], shape[-1] // count * nbytes)


def prevailing_dtype(tensors: Iterable[tuple[str, int]]) -> str:
    """Return the dtype that most bytes have; empty for no tensors.

    Args:
        tensors: the dtype of each, and its size in bytes.
    """
    nbytes: dict[str, int] = {}
    for dtype, size in tensors:
        nbytes[dtype] = nbytes.get(dtype, 0) + size
    return max(nbytes, key=lambda dtype: nbytes[dtype], default="")
