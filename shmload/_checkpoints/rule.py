"""A rule: the dtype that each tensor of a checkpoint gets, so that the library has nothing to cast.

Which rule a checkpoint gets: the remembered one, that of its class, or the probable one. The
library that owns a class tells its rule, which takes 3 s to import; so it is remembered.

In doubt a rule leaves a tensor as it is. The library then casts it itself, which is slower and
never wrong.
"""

import hashlib
import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Self

import msgspec

from shmload._checkpoints.dtypes import (
    BLOCKS,
    FLOATS,
    TORCH_NAMES,
    WITHIN_F32,
    is_auto,
    parse_dtype,
    prevailing_dtype,
)
from shmload._checkpoints.formats.known import read_header
from shmload._checkpoints.header import TensorSpec
from shmload._checkpoints.library import library
from shmload._checkpoints.quantised import says_quantised
from shmload._checkpoints.resolve import config_of
from shmload._checkpoints.source import Checkpoint, Source, no_component
from shmload._host.descriptors import Descriptor
from shmload._host.files import open_source
from shmload._host.memo import Memo
from shmload.errors import UnknownDtype

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


# What `dtype="auto"` means ------------------------------------------------------------------------
#
# Each model gets its checkpoint's own dtype. For a model of transformers that is what transformers
# does: the dtype that its configuration names, or else that of its first weight. diffusers knows no
# `auto` and would load float32; here a model of diffusers gets the dtype that most bytes of its
# weights have. A component whose weights shmload leaves to the libraries gets what its
# configuration names.

_DEFAULT = "float32"
Floats = Sequence[tuple[str, int]]
"""The safetensors dtype and the size in bytes of each float tensor."""


def settle_dtype(dtype: object, source: Source, passed: Collection[str] = ()) -> Any:
    """Return a wanted dtype with names in place of `auto`; another one as it is.

    Args:
        dtype: a dtype, its name, None, or a dict of these by component.
        source: what is loaded. Its headers are read, no weights.
        passed: names of other components, which the caller gives to the pipeline.

    Returns:
        For a pipeline a dict by component. None for files without a class: their floats keep the
        dtypes that they have.

    Raises:
        CheckpointError: a header is wrong.
        UnknownComponent: the dict names a component that the pipeline lacks.
    """
    given = dtype if isinstance(dtype, Mapping) else {"default": dtype}
    if source.is_pipeline:
        known = {*source.components, *passed, "default"}
        for name in given:
            if name not in known:
                raise no_component(str(name), source.given, known - {"default"})
    if source.is_modular and isinstance(dtype, Mapping):
        dtype = given = {"default": None, **given}  # the library leaves the others to their classes
    if not any(map(is_auto, given.values())):
        return dtype
    by_name = {checkpoint.component: checkpoint for checkpoint in source.checkpoints}
    if not source.is_pipeline:
        chosen = given.get("", given.get("default", _DEFAULT))
        return own_dtype(by_name[""]) if is_auto(chosen) else chosen
    settled = {name: value for name, value in given.items() if not is_auto(value)}
    for name in source.components:
        if is_auto(given.get(name, given.get("default"))):
            found = by_name.get(name)
            own = own_dtype(found) if found else _configured(config_of(source.folder_of(name)))
            settled[name] = own or _DEFAULT
    return {"default": _DEFAULT} | settled


def most_common_dtype(source: Source) -> str:
    """Return what `auto` means for a model of diffusers: torch's name of its weights' dtype.

    Raises:
        CheckpointError: a header is wrong.
    """
    floats = [each for checkpoint in source.checkpoints for each in _floats(checkpoint)]
    return _named(prevailing_dtype(floats)) or _DEFAULT


def own_dtype(checkpoint: Checkpoint) -> str | None:
    """Return torch's name of a checkpoint's dtype; None if it has no class or no floats."""
    if not checkpoint.class_name:
        return None
    if checkpoint.library == "diffusers":  # which notes none
        return _named(prevailing_dtype(_floats(checkpoint)))
    return _configured(checkpoint.config) or _first(_floats(checkpoint))


def _first(floats: Floats) -> str | None:
    """Return torch's name of the first dtype that transformers would take; None if none is."""
    return _named(next((dtype for dtype, _ in floats if not dtype.startswith("F8_")), ""))


def _named(dtype: str) -> str | None:
    return TORCH_NAMES[dtype] if dtype else None


def _configured(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that a model's configuration names; None if it names none."""
    try:
        named = config.get("dtype") or config.get("torch_dtype")
        return TORCH_NAMES[parse_dtype(named)] if named else None
    except UnknownDtype:
        return None


def _floats(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    found = stored_tensors(checkpoint)
    return [(each.dtype, each.nbytes) for each in found if each.dtype in FLOATS]


def stored_tensors(checkpoint: Checkpoint) -> Iterator[TensorSpec]:
    """Yield the tensors of all shards.

    Raises:
        CheckpointError: a header is wrong.
    """
    for path in checkpoint.shards:
        with Descriptor(open_source(path)) as file:
            yield from read_header(file.fd, path).tensors
