"""The quantised kinds of GGUF: how many elements a block has, and how many bytes.

A quantised tensor is a row of blocks, which only a whole block at a time can be dequantised. Inside
shmload a kind is a dtype of a shard, by ggml's name (`Q4_K`); a segment has the blocks as `U8`, or
floats.
"""

from shmload._checkpoints.dtypes import NBITS

# GGML_QUANT_SIZES of the gguf package 0.19 (a test compares them).
BLOCKS: dict[str, tuple[int, int]] = {
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
"""Elements and bytes of a block, by kind."""

# The numbers that are missing were removed from ggml.
GGML_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""ggml_type: a tensor's kind by its number. A kind that is not in `BLOCKS` is a plain dtype."""

LARGEST_BLOCK = 256
"""The most elements that a block has; the other sizes divide it."""

RAW_BLOCKS = "U8"
"""The dtype of blocks in a segment."""


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
