"""How sources change. Each change is a generator that yields the seconds to wait in its middle."""

import os
import random
from collections.abc import Callable, Iterator

from soaking.history import State
from soaking.sources import Shard

Pauses = Iterator[float]
_BLOCKS = 5


def replace(shard: Shard, rng: random.Random) -> Pauses:
    """Rename a new version over the old one."""
    version, content = shard.make_version(same_form=rng.random() < 0.5)
    fresh = shard.path.with_suffix(".new")
    fresh.write_bytes(content)
    with shard.history.turning(version):
        fresh.rename(shard.path)
    yield from ()


def rewrite(shard: Shard, rng: random.Random) -> Pauses:
    """Cut the file to nothing and write a new version into it, as `cp` does."""
    version, content = shard.make_version()
    with shard.history.turning(State.BROKEN):
        os.truncate(shard.path, 0)
    with shard.path.open("r+b", buffering=0) as file:
        *blocks, last = _split(content)
        for block in blocks:
            yield rng.choice((0, 0.05, 0.3))
            file.write(block)
        with shard.history.turning(version):
            file.write(last)


def overwrite(shard: Shard, rng: random.Random) -> Pauses:
    """Write a version of the same form over the old one, at the same length."""
    version, content = shard.make_version(same_form=True)
    first, *others, last = _split(content)
    with shard.path.open("r+b", buffering=0) as file:
        with shard.history.turning(State.TORN):
            file.write(first)
        for block in others:
            yield rng.choice((0, 0.05, 0.3))
            file.write(block)
        yield 0
        with shard.history.turning(version):
            file.write(last)


def truncate(shard: Shard, rng: random.Random) -> Pauses:
    """Cut the file short, and restore it later."""
    version, content = shard.history.now, shard.path.read_bytes()
    assert not isinstance(version, State)
    with shard.history.turning(State.BROKEN):
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
