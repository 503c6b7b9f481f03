"""A rule: the dtype that each tensor of a checkpoint gets, so that the library has nothing to cast.

Which rule a checkpoint gets: the remembered one, that of its class, or the probable one. The
library that owns a class tells its rule, which takes 3 s to import; so it is remembered.

In doubt a rule leaves a tensor as it is. The library then casts it itself, which is slower and
never wrong.
"""

import hashlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Self

import msgspec

from shmload._checkpoints.dtypes import BLOCKS, FLOATS, WITHIN_F32, parse_dtype
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.library import library
from shmload._checkpoints.quantised import says_quantised
from shmload._checkpoints.source import Checkpoint
from shmload._host.memo import Memo

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
    """Whether quantised blocks stay as they are, so that only `PLAIN_KINDS` are converted."""

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


# To be increased whenever `shmload._building.rules` derives other rules than before.
_RULES_VERSION = 1
_LIBRARIES = ("torch", "diffusers", "transformers")


def wanted_dtype(dtype: object, component: str) -> str | None:
    """Return the dtype that diffusers would pass to a component; None leaves it to the library.

    Args:
        dtype: a dtype, its name, None, or a dict of these by component with a `default`.
        component: its name in the pipeline, or empty.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    if isinstance(dtype, Mapping):
        # DiffusionPipeline.from_pretrained: a dict without "default" gives float32.
        dtype = dtype.get(component, dtype.get("default", "float32"))
    return None if dtype is None else parse_dtype(dtype)


def rule_for(checkpoint: Checkpoint, dtype: object) -> Rule:
    """Return the rule of a checkpoint, from memory or from the library that owns its class.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    if known := known_rule(checkpoint, dtype):
        return known
    target = wanted_dtype(dtype, checkpoint.component)
    derived: Rule = library("rules").derive_rule(checkpoint, target)
    _memo(checkpoint, target).write(derived)
    return derived


def likely_rule(checkpoint: Checkpoint, dtype: object) -> Rule:
    """Return the probable rule of a checkpoint, without importing a library.

    It is the remembered rule, or else the one that most classes have. Decoding may begin with it,
    and must begin again if `rule_for` returns another one.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    if known := known_rule(checkpoint, dtype):
        return known
    target = wanted_dtype(dtype, checkpoint.component)
    if target is None and checkpoint.library == "diffusers":
        return Rule(target="F32", is_widening=True)
    return Rule(target=target)


def known_rule(checkpoint: Checkpoint, dtype: object) -> Rule | None:
    """Return the rule of a checkpoint if it is found without importing a library; else None.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    target = wanted_dtype(dtype, checkpoint.component)
    if says_quantised(checkpoint):
        return RAW
    if not checkpoint.class_name:
        return Rule(target=target)
    return _memo(checkpoint, target).read()


def forget_rule(checkpoint: Checkpoint, dtype: object) -> None:
    """Drop a remembered rule that a loaded model contradicts."""
    target = wanted_dtype(dtype, checkpoint.component)
    _memo(checkpoint, target).forget()


def _memo(checkpoint: Checkpoint, target: str | None) -> Memo[Rule]:
    facts = (
        _RULES_VERSION,
        library_versions(),
        checkpoint.library,
        checkpoint.class_name,
        checkpoint.config,
        target,
    )
    return Memo("rules", Rule, facts)


@cache
def library_versions() -> tuple[str, ...]:
    """Return version and place of the libraries that rules and classes come from."""
    from importlib.metadata import version  # 20 ms that many commands spare

    found = []
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        found.append(f"{version(name)} {spec.origin if spec else ''}")
    return tuple(found)
