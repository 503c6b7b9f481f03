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
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load, save

TARGETS = (None, "float32", "bfloat16", "float16")
"""The dtypes that loads request; None for the file's own."""

_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_LARGEST = 1 << 20

Version = Mapping[str | None, dict[str, str]]
"""Digest of every tensor: requested dtype to tensor name to digest."""


@dataclass(slots=True)
class _Period:
    """A span of time in which a shard did not change."""

    holds: Version | None
    """None while the file is too short: every load of it must fail."""
    begin_s: float
    end_s: float = math.inf


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
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while it changes."""
    _form: dict[str, tuple[torch.dtype, int]] = field(default_factory=dict)
    """Dtype and number of elements of every tensor."""
    _periods: list[_Period] = field(default_factory=list)

    def __post_init__(self) -> None:
        content = self.make_content()
        self.path.write_bytes(content)
        self._periods.append(_Period(version_of(content), time.monotonic()))

    def make_content(self, *, same_form: bool = False) -> bytes:
        """Return the content of a new version.

        Args:
            same_form: keep dtypes and sizes of the last version, and so its length.
        """
        if not same_form:
            sizes = (int(_LARGEST ** self.rng.uniform(0.2, 1)) for _ in self.names)
            self._form = {name: (self.rng.choice(_DTYPES), next(sizes)) for name in self.names}
            # A tensor that each dtype converts, so that no load maps the file itself.
            self._form[self.names[0]] = (torch.float64, 1000)
        generator = torch.Generator().manual_seed(self.rng.getrandbits(60))
        return save(
            {
                name: torch.randn(count, generator=generator).mul(100).to(dtype)
                for name, (dtype, count) in self._form.items()
            }
        )

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


def version_of(content: bytes) -> Version:
    """Return what a load of a file's content must give; torch alone converts."""
    tensors = load(content)
    found: dict[str | None, dict[str, str]] = {None: digest_tensors(tensors)}
    for target in filter(None, TARGETS):
        dtype = getattr(torch, target)
        found[target] = digest_tensors(
            {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
        )
    return found


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
        base = ("model", "diffusion_pytorch_model")[number % 2]
        shards = tuple(_make_shards(path, base, count, rng))
        if count > 1:
            places = {name: shard.path.name for shard in shards for name in shard.names}
            index = json.dumps({"metadata": {}, "weight_map": places})
            (path / f"{base}.safetensors.index.json").write_text(index)
        sources.append(Source(shards[0].path if number < 2 else path, shards, number % 4 > 1))
    return sources


def _make_shards(folder: Path, base: str, count: int, rng: random.Random) -> Iterator[Shard]:
    for number in range(count):
        part = "" if count == 1 else f"-{number + 1:05}-of-{count:05}"
        names = tuple(f"layers.{number}.{tensor}.weight" for tensor in range(rng.randint(2, 6)))
        yield Shard(folder / f"{base}{part}.safetensors", names, random.Random(rng.random()))
