"""How a file is read follows from where it lies and what of it is in memory."""

import os

import pytest

from shmload._host import procfs, reading
from shmload._host.procfs import FileSystem
from shmload._host.reading import (
    MAX_READERS,
    READ_NBYTES,
    Reading,
    choose_reading,
    is_rotational,
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
    ("kind", "cached", "is_turning", "workers", "wanted"),
    [
        ("tmpfs", 0.0, False, 1, (0, False)),
        ("ext4", 1.0, False, 1, (0, False)),
        ("nfs4", 0.9, False, 1, (0, False)),
        ("ext4", 0.1, False, 4, (4, False)),
        ("overlay", None, False, 1, (4, False)),
        ("ext4", 0.0, True, 2, (1, False)),
        ("nfs4", 0.0, False, 1, (MAX_READERS, True)),
        ("fuse.s3fs", None, False, 4, (MAX_READERS // 4, True)),
        ("fuse.s3fs", None, False, 32, (4, True)),
    ],
)
def test_reading_follows_from_the_place(fd, monkeypatch, kind, cached, is_turning, workers, wanted):
    monkeypatch.setattr(procfs, "file_system", lambda device: FileSystem(kind, ()))
    monkeypatch.setattr(reading, "open_direct", os.dup)
    monkeypatch.setattr(reading, "cached_part", lambda fd, nbytes: cached)
    monkeypatch.setattr(reading, "is_rotational", lambda device: is_turning)
    found = choose_reading(fd, workers)
    assert (found.readers, found.direct_fd is not None) == wanted
    found.close()
    os.ftruncate(fd, READ_NBYTES)
    assert choose_reading(fd, workers) == Reading(fd)


def test_disk_that_turns_is_known_by_itself_and_by_a_partition(tmp_path):
    disk = tmp_path / "sda"
    (disk / "queue").mkdir(parents=True)
    (disk / "queue" / "rotational").write_text("1\n")
    (disk / "sda1").mkdir()
    links = tmp_path / "block"
    links.mkdir()
    (links / "8:0").symlink_to(disk)
    (links / "8:1").symlink_to(disk / "sda1")
    assert is_rotational(os.makedev(8, 0), links)
    assert is_rotational(os.makedev(8, 1), links)
    assert not is_rotational(os.makedev(0, 40), links)
