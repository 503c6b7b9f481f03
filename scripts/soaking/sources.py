"""Generated checkpoints: small, of mixed dtypes, some sharded, in many versions.

A history says which version of a shard was current when, and so what a load may have read. Its
times are of the monotonic clock, which all processes share. They are generous: a period begins
before the change that begins it, and ends after the change that ends it.
"""

import contextlib
import hashlib
import json
import math
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load, save

TARGETS = (None, "float32", "bfloat16", "float16")
"""The dtypes that loads request; None for the file's own."""

_FLOATS = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
_OTHERS = (torch.int64, torch.uint8, torch.bool)
_LARGEST = 1 << 20
_BASES = ("model", "diffusion_pytorch_model")

Form = dict[str, tuple[torch.dtype, int]]
"""Dtype and number of elements of every tensor."""


@dataclass(frozen=True, slots=True)
class Version:
    """The content of a shard, as its tensors' digests."""

    number: int
    digests: dict[str | None, dict[str, str]]
    """Digest of every tensor: requested dtype to tensor name to digest."""


@dataclass(slots=True)
class _Period:
    """A span of time in which a shard did not change."""

    holds: Version | None
    """None while the file is too short: every load of it must fail."""
    begin_s: float
    end_s: float = math.inf


class History:
    """All periods of one shard, oldest first."""

    def __init__(self, version: Version) -> None:
        self._periods = [_Period(version, time.monotonic())]

    @contextlib.contextmanager
    def turning(self, holds: Version | None) -> Iterator[None]:
        """Note that the block changes the shard to this version."""
        before = self._periods[-1]
        self._periods.append(_Period(holds, time.monotonic()))
        try:
            yield
        finally:
            before.end_s = time.monotonic()

    def between(self, begin_s: float, end_s: float) -> list[Version | None]:
        """Return what a load may have read, oldest first."""
        return [p.holds for p in self._periods if p.begin_s <= end_s and p.end_s >= begin_s]


def digest_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return, for every tensor, one text with dtype, shape and digest of its bytes."""
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest}"


@dataclass(slots=True)
class Shard:
    """A file and its history. Versions differ in values, and most in form."""

    path: Path
    names: tuple[str, ...]
    rng: random.Random
    is_odd: bool
    """Whether every version has a tensor that needs a conversion to each requested dtype."""
    form: Form = field(default_factory=dict)
    history: History = field(init=False)
    versions: int = 0
    """Number of versions so far."""

    def __post_init__(self) -> None:
        content = self.make_content()
        self.path.write_bytes(content)
        self.history = History(self.version(content))

    def make_content(self, *, same_form: bool = False) -> bytes:
        """Return the content of a new version.

        Args:
            same_form: keep dtypes and sizes of the last version, and so its length.
        """
        if not same_form:
            self.form = {name: self._choose_form() for name in self.names}
            if self.is_odd:
                self.form[self.names[0]] = (torch.float64, 1000)
        generator = torch.Generator().manual_seed(self.rng.getrandbits(60))
        return save({name: _fill(*form, generator) for name, form in self.form.items()})

    def version(self, content: bytes) -> Version:
        """Return what a load of this content must give."""
        self.versions += 1
        tensors = load(content)
        digests = {target: digest_tensors(_convert(tensors, target)) for target in TARGETS}
        return Version(self.versions, digests)

    def _choose_form(self) -> tuple[torch.dtype, int]:
        dtype = self.rng.choice(_FLOATS if self.rng.random() < 0.8 else _OTHERS)
        return dtype, int(_LARGEST ** self.rng.uniform(0.2, 1))


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint: the shards that one path loads."""

    path: Path
    shards: tuple[Shard, ...]
    changes_in_place: bool
    """False: its files are only replaced, by rename."""

    def must_keep(self, target: str | None) -> bool:
        """Tell whether a load must keep segments, because it would map some shard directly.

        EXCLUDED: a mapped shard shows writes to the file, and raises SIGBUS where it was cut
        short, as with safetensors itself. `load_state_dict` documents that.
        """
        return self.changes_in_place and target is None


def make_sources(folder: Path, rng: random.Random) -> list[Source]:
    """Make all sources of a soak: one to three shards each, half of them changed in place."""
    sources = []
    for number, count in enumerate((1, 1, 1, 1, 2, 2, 3, 3)):
        path = folder / f"source-{number}"
        path.mkdir(parents=True)
        base = _BASES[number % 2]
        changes_in_place = number % 4 > 1
        shards = tuple(_make_shards(path, base, count, rng, is_odd=changes_in_place))
        if count > 1:
            _write_index(path / f"{base}.safetensors.index.json", shards)
        given = shards[0].path if number < 2 else path
        sources.append(Source(given, shards, changes_in_place))
    return sources


def _make_shards(
    folder: Path, base: str, count: int, rng: random.Random, *, is_odd: bool
) -> Iterator[Shard]:
    for number in range(count):
        part = "" if count == 1 else f"-{number + 1:05}-of-{count:05}"
        names = tuple(f"layers.{number}.{tensor}.weight" for tensor in range(rng.randint(2, 6)))
        own = random.Random(rng.random())
        yield Shard(folder / f"{base}{part}.safetensors", names, own, is_odd)


def _write_index(path: Path, shards: tuple[Shard, ...]) -> None:
    weight_map = {name: shard.path.name for shard in shards for name in shard.names}
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _fill(dtype: torch.dtype, count: int, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 200, (count,), generator=generator).to(
        dtype
    )


def _convert(tensors: dict[str, torch.Tensor], target: str | None) -> dict[str, torch.Tensor]:
    """Convert with torch alone, as a load must."""
    if target is None:
        return tensors
    dtype = getattr(torch, target)
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
