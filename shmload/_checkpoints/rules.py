"""Which dtype each tensor of a checkpoint gets, so that the library has nothing left to cast.

A rule is a value. `integrations` derives it from a model class and a wanted dtype, which takes 3 s
for importing the libraries; so it is remembered on disk. In doubt a rule leaves a tensor as it is:
the library then casts it itself, which is slower and never wrong.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from shmload._checkpoints.dtypes import FLOATS, WITHIN_F32, parse_dtype
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.library import library
from shmload._checkpoints.resolve import Checkpoint
from shmload._host.files import replacing
from shmload._settings import settings

# To be increased whenever `shmload.integrations._build.rules` derives other rules than before.
_RULES_VERSION = 1
_LIBRARIES = ("torch", "diffusers", "transformers")


class Rule(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The dtypes of one checkpoint's tensors in their segments; layouts call it as a `DtypeOf`."""

    target: str | None = None
    """The safetensors dtype that floats get, or None to leave all tensors as they are."""

    is_widening: bool = False
    """Only floats that the target holds exactly are converted."""

    fp32_parts: tuple[str, ...] = ()
    """Tensors with one of these between the dots of their names get float32 instead."""

    only: frozenset[str] | None = None
    """Only these names are converted; None for all."""

    def __call__(self, tensor: TensorSpec) -> str:
        """Return the dtype that a tensor gets in the segment."""
        if self.target is None or tensor.dtype not in FLOATS:
            return tensor.dtype
        if self.only is not None and tensor.name not in self.only:
            return tensor.dtype
        if self.fp32_parts and not set(self.fp32_parts).isdisjoint(tensor.name.split(".")):
            return "F32" if tensor.dtype in WITHIN_F32 else tensor.dtype
        if self.is_widening and tensor.dtype not in WITHIN_F32:
            return tensor.dtype
        return self.target

    def leaves_cast(self, tensor: TensorSpec) -> bool:
        """Tell whether the library certainly has to cast a tensor itself."""
        # A tensor left in float32 is either wanted so or cast; only the built model tells which.
        return (
            self.target is not None
            and tensor.dtype in FLOATS
            and self(tensor) not in (self.target, "F32")
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


def wanted_dtype(torch_dtype: object, component: str) -> str | None:
    """Return the dtype that diffusers would pass to a component; None leaves it to the library.

    Args:
        torch_dtype: a dtype, its name, None, or a dict of these by component with a `default`.
        component: its name in the pipeline, or empty.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    if isinstance(torch_dtype, Mapping):
        # DiffusionPipeline.from_pretrained: a dict without "default" gives float32.
        torch_dtype = torch_dtype.get(component, torch_dtype.get("default", "float32"))
    return None if torch_dtype is None else parse_dtype(torch_dtype)


def rule_for(checkpoint: Checkpoint, torch_dtype: object) -> Rule:
    """Return the rule of a checkpoint, from memory or from the library that owns its class.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    target = wanted_dtype(torch_dtype, checkpoint.component)
    return _known_rule(checkpoint, target) or _ask_class(checkpoint, target)


def likely_rule(checkpoint: Checkpoint, torch_dtype: object) -> Rule:
    """Return the probable rule of a checkpoint, without importing a library.

    It is the remembered rule, or else the one that most classes have. Decoding may begin with it,
    and must begin again if `rule_for` returns another one.

    Raises:
        UnknownDtype: a name is not that of a dtype.
    """
    target = wanted_dtype(torch_dtype, checkpoint.component)
    return _known_rule(checkpoint, target) or _most_common_rule(checkpoint, target)


def _known_rule(checkpoint: Checkpoint, target: str | None) -> Rule | None:
    if not checkpoint.class_name:
        return Rule(target=target)
    if checkpoint.config.get("quantization_config"):
        return RAW
    try:
        return msgspec.json.decode(_memory_path(checkpoint, target).read_bytes(), type=Rule)
    except (OSError, msgspec.DecodeError):
        return None


def _ask_class(checkpoint: Checkpoint, target: str | None) -> Rule:
    """Have the rule derived from the model's class, and remember it."""
    rule = library().derive_rule(checkpoint, target)
    _remember(_memory_path(checkpoint, target), rule)
    return rule


def _most_common_rule(checkpoint: Checkpoint, target: str | None) -> Rule:
    if target is None and checkpoint.library == "diffusers":
        return Rule(target="F32", is_widening=True)
    return Rule(target=target)


def forget_rule(checkpoint: Checkpoint, torch_dtype: object) -> None:
    """Drop a remembered rule that a loaded model contradicts."""
    target = wanted_dtype(torch_dtype, checkpoint.component)
    _memory_path(checkpoint, target).unlink(missing_ok=True)


def _memory_path(checkpoint: Checkpoint, target: str | None) -> Path:
    """Return the file that remembers a rule; its name digests everything the rule depends on."""
    facts = (
        _RULES_VERSION,
        _library_versions(),
        checkpoint.library,
        checkpoint.class_name,
        checkpoint.config,
        target,
    )
    # Not msgspec, which cannot write half a surrogate; a configuration may hold one.
    known = json.dumps(facts, sort_keys=True)
    return (
        settings().cache_dir / "rules" / hashlib.blake2b(known.encode(), digest_size=16).hexdigest()
    )


@cache
def _library_versions() -> tuple[str, ...]:
    found = []
    for name in _LIBRARIES:
        spec = importlib.util.find_spec(name)
        found.append(f"{importlib.metadata.version(name)} {spec.origin if spec else ''}")
    return tuple(found)


def _remember(path: Path, rule: Rule) -> None:
    """Write a rule's file in one step; if that fails, the class is asked again next time."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(_ENCODER.encode(rule))
