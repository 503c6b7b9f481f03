"""How a file is read follows from where it lies and what of it is in memory."""

import os

import pytest

from shmload._host import procfs, reading
from shmload._host.reading import (
    MAX_READERS,
    READ_NBYTES,
    Reading,
    choose_reading,
)

_NBYTES = 8 * READ_NBYTES


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(_NBYTES))
    opened = os.open(path, os.O_RDWR)
    os.fsync(opened)
    yield opened
    os.close(opened)


@pytest.mark.parametrize(
    ("kind", "cached", "workers", "wanted"),
    [
        ("tmpfs", 0.0, 1, (0, False)),
        ("ext4", 1.0, 1, (0, False)),
        ("nfs4", 0.9, 1, (0, False)),
        ("ext4", 0.1, 4, (4, False)),
        ("overlay", None, 1, (4, False)),
        ("nfs4", 0.0, 1, (MAX_READERS, True)),
        ("fuse.s3fs", None, 4, (MAX_READERS // 4, True)),
        ("fuse.s3fs", None, 32, (4, True)),
    ],
)
def test_reading_follows_from_the_place(fd, monkeypatch, kind, cached, workers, wanted):
    monkeypatch.setattr(procfs, "file_system", lambda device: kind)
    monkeypatch.setattr(reading, "open_direct", os.dup)
    monkeypatch.setattr(reading, "cached_part", lambda fd, nbytes: cached)
    found = choose_reading(fd, workers)
    assert (found.readers, found.is_past_cache) == wanted
    found.close()
    os.ftruncate(fd, READ_NBYTES)
    assert choose_reading(fd, workers) == Reading(fd)
