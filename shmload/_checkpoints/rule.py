"""A rule: the dtype that each tensor of a checkpoint gets, so that the library has nothing to cast.

In doubt a rule leaves a tensor as it is. The library then casts it itself, which is slower and
never wrong.
"""

import hashlib
from typing import Self

import msgspec

from shmload._checkpoints.dtypes import BLOCKS, FLOATS, WITHIN_F32
from shmload._checkpoints.header import TensorSpec

PLAIN_KINDS = ("F32", "F16")
"""diffusers has these as tensors, and all other kinds of ggml as parameters of bytes (0.35 to
0.42): BF16, too."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The dtypes of one checkpoint's tensors in their segments; layouts call it as a `DtypeOf`."""

    target: str | None = None
    """The safetensors dtype that floats get, and quantised tensors; None to leave all tensors as
    they are."""

    is_widening: bool = False
    """Only floats that the target holds exactly are converted."""

    fp32_parts: tuple[str, ...] = ()
    """Tensors with one of these between the dots of their names get float32 instead."""

    only: frozenset[str] | None = None
    """Only these names are converted; None for all."""

    keeps_blocks: bool = False
    """Of a file with blocks only `PLAIN_KINDS` are converted; blocks stay as they are."""

    def __call__(self, tensor: TensorSpec) -> str:
        """Return the dtype that a tensor gets in the segment."""
        is_quantised = tensor.dtype in BLOCKS
        if self.keeps_blocks and tensor.dtype not in PLAIN_KINDS:
            return tensor.dtype
        if self.target is None or not (tensor.dtype in FLOATS or is_quantised):
            return tensor.dtype
        is_within_f32 = is_quantised or tensor.dtype in WITHIN_F32
        if self.only is not None and tensor.name not in self.only:
            return tensor.dtype
        if self.fp32_parts and not set(self.fp32_parts).isdisjoint(tensor.name.split(".")):
            return "F32" if is_within_f32 else tensor.dtype
        if self.is_widening and not is_within_f32:
            return tensor.dtype
        return self.target

    def leaves_cast(self, tensor: TensorSpec, applied: Self) -> bool:
        """Tell whether the library certainly has to cast a tensor itself.

        Args:
            tensor: of the file.
            applied: the rule by which its segment is made.
        """
        # A tensor left in float32 is either wanted so or cast; only the built model tells which.
        return (
            self.target is not None
            and tensor.dtype in FLOATS
            and applied(tensor) not in (self.target, "F32")
        )

    @property
    def text(self) -> str:
        """Different for different rules; part of a segment's name, and shown by `shmload ls`."""
        if self.target is None:
            return "raw"
        if self == Rule(target=self.target):
            return self.target
        digest = hashlib.blake2b(_ENCODER.encode(self), digest_size=4).hexdigest()
        return f"{self.target}/{digest}"


RAW = Rule()
_ENCODER = msgspec.json.Encoder(order="deterministic")
