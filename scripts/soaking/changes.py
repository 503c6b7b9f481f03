"""Changes of sources. Each is a generator that yields the seconds to wait half-way through."""

import os
import random
from collections.abc import Callable, Iterator

from soaking.sources import Shard

Pauses = Iterator[float]
_BLOCKS = 5
_PAUSES_S = (0, 0.05, 0.3)


def replace(shard: Shard, rng: random.Random) -> Pauses:
    """Rename a new version over the old one."""
    content = shard.make_content(same_form=rng.random() < 0.5)
    version = shard.version(content)
    fresh = shard.path.with_suffix(".new")
    fresh.write_bytes(content)
    with shard.history.turning(version):
        fresh.rename(shard.path)
    yield from ()


def rewrite(shard: Shard, rng: random.Random) -> Pauses:
    """Truncate the file to zero and write a new version into it, as `cp` does."""
    content = shard.make_content()
    version = shard.version(content)
    with shard.history.turning(None):
        os.truncate(shard.path, 0)
    with shard.path.open("r+b", buffering=0) as file:
        *blocks, last = _split(content)
        for block in blocks:
            yield rng.choice(_PAUSES_S)
            file.write(block)
        with shard.history.turning(version):
            file.write(last)


def overwrite(shard: Shard, rng: random.Random) -> Pauses:
    """Write a version of the same form and length over the old one.

    Between two writes the file is half new and half old. That counts as a version of its own,
    because a load may begin and end there. Each write counts as atomic, which it is except for
    microseconds.
    """
    old, new = shard.path.read_bytes(), shard.make_content(same_form=True)
    blocks, written = _split(new), 0
    with shard.path.open("r+b", buffering=0) as file:
        for number, block in enumerate(blocks, 1):
            written += len(block)
            version = shard.version(new[:written] + old[written:])
            with shard.history.turning(version):
                file.write(block)
            if number < len(blocks):
                yield rng.choice(_PAUSES_S)


def truncate(shard: Shard, rng: random.Random) -> Pauses:
    """Cut the file short, and restore it later."""
    content = shard.path.read_bytes()
    version = shard.version(content)
    with shard.history.turning(None):
        os.truncate(shard.path, rng.randrange(len(content)))
    yield rng.uniform(0.1, 1.5)
    with shard.path.open("r+b", buffering=0) as file:
        file.write(content[:-1])
        file.seek(len(content) - 1)
        with shard.history.turning(version):
            file.write(content[-1:])


IN_PLACE: tuple[Callable[[Shard, random.Random], Pauses], ...] = (rewrite, overwrite, truncate)


def _split(content: bytes) -> list[bytes]:
    size = len(content) // _BLOCKS + 1
    return [content[at : at + size] for at in range(0, len(content), size)]
