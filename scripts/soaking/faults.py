"""The faults of a soak: signals, changed sources, full memory. Each undoes itself at its end."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

from watching import children_of

from soaking.processes import SHM, Client, signalling
from soaking.sources import Shard, Source, version_of

Count = Callable[[str, str], None]
"""Counts a fault of a kind, with what it hits."""

_BALLAST = SHM / "soak-ballast"
_BLOCKS = 5
_PAUSES_S = (0, 0.05, 0.3)
_LEFT_NBYTES = (0, 100_000, 1_000_000, 4_000_000)


def stop_s(rng: random.Random) -> float:
    """Return for how long a process is stopped, in seconds."""
    return rng.choice((0.1, 1.0, 8.0)) * rng.uniform(0.2, 1)


def kill_client(client: Client, count: Count, rng: random.Random) -> None:
    count("kill a client", client.name)
    client.kill()


def stop_client(client: Client, count: Count, rng: random.Random) -> None:
    count("stop a client", client.name)
    with signalling(client.process.pid, signal.SIGSTOP):
        time.sleep(stop_s(rng))


def harm_worker(client: Client, count: Count, rng: random.Random) -> None:
    parent = client.process.pid
    if workers := children_of(parent):
        number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
        count("kill a worker" if number == signal.SIGKILL else "stop a worker", client.name)
        with signalling(rng.choice(workers), number, parent):
            time.sleep(0 if number == signal.SIGKILL else stop_s(rng))


def fill(count: Count, rng: random.Random) -> None:
    """Fill shared memory for a while, but for some bytes."""
    found, left = os.statvfs(SHM), rng.choice(_LEFT_NBYTES)
    nbytes = found.f_bavail * found.f_frsize - left
    with contextlib.suppress(FileExistsError):  # full already
        fd = os.open(_BALLAST, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        count("fill shared memory", f"up to {left} bytes")
        try:
            if nbytes > 0:
                with contextlib.suppress(OSError):  # another process took the room
                    os.posix_fallocate(fd, 0, nbytes)
            time.sleep(rng.uniform(0.2, 2))
        finally:
            os.close(fd)
            _BALLAST.unlink()


# Changes of a shard -------------------------------------------------------------------------------


def change(source: Source, shard: Shard, count: Count, rng: random.Random) -> None:
    """Change a shard in one of the ways that its source allows, unless it changes already."""
    if shard.lock.acquire(blocking=False):
        try:
            way = rng.choice((_replace, _rewrite)) if source.changes_in_place else _replace
            count(way.__name__.strip("_"), str(shard.path))
            way(shard, rng)
        finally:
            shard.lock.release()


def _replace(shard: Shard, rng: random.Random) -> None:
    """Rename a new version over the old one."""
    content = shard.make_content(same_form=rng.random() < 0.5)
    version = version_of(content)
    fresh = shard.path.with_suffix(".new")
    fresh.write_bytes(content)
    with shard.turning(version):
        fresh.rename(shard.path)


def _rewrite(shard: Shard, rng: random.Random) -> None:
    """Truncate the file to zero and write a new version into it, as `cp` does."""
    content = shard.make_content(same_form=rng.random() < 0.5)
    version = version_of(content)
    with shard.turning(None):
        os.truncate(shard.path, 0)
    size = len(content) // _BLOCKS + 1
    with shard.path.open("r+b", buffering=0) as file:
        for at in range(0, len(content) - size, size):
            time.sleep(rng.choice(_PAUSES_S))
            file.write(content[at : at + size])
        with shard.turning(version):
            file.write(content[file.tell() :])
