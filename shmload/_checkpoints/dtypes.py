"""Names and sizes of tensor dtypes, without torch.

Inside shmload a dtype is its safetensors name (`"BF16"`); users give torch's (`torch.bfloat16` or
`"bfloat16"`).
"""

from collections.abc import Sequence

from shmload.errors import ArgumentError, UnknownDtype

# Bits per element of every dtype that safetensors 0.8 knows
# (github.com/huggingface/safetensors, safetensors/src/tensor.rs, `Dtype::bitsize`).
NBITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

# torch's name of each dtype, for those that torch has.
TORCH_NAMES: dict[str, str] = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

# What `torch.is_floating_point` says of a dtype, and the conversions cover.
FLOATS = frozenset(
    {
        "F64",
        "F32",
        "F16",
        "BF16",
        "F8_E4M3",
        "F8_E5M2",
        "F8_E4M3FNUZ",
        "F8_E5M2FNUZ",
        "F8_E8M0",
    }
)

# Floats whose every value float32 holds exactly.
WITHIN_F32 = FLOATS - {"F64", "F32"}

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
        raise UnknownDtype(dtype, [*_BY_TORCH_NAME, AUTO], ("bf16", "fp16", "fp32"))
    return found
