"""What decides how a file is read is found out without reading a file that is in memory."""

import os

import pytest

from shmload._host import reading
from shmload._host.reading import READ_NBYTES, cached_part, examine, is_rotational, open_direct

_NBYTES = 8 * READ_NBYTES


@pytest.fixture
def fd(tmp_path):
    path = tmp_path / "shard"
    path.write_bytes(os.urandom(_NBYTES))
    opened = os.open(path, os.O_RDWR)
    os.fsync(opened)
    yield opened
    os.close(opened)


@pytest.fixture
def cold_fd(fd):
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if cached_part(fd, _NBYTES) != 0:
        pytest.skip("the kernel keeps the file in memory, or does not tell")
    return fd


def test_file_in_memory_is_not_measured(fd):
    facts = examine(fd)
    if facts.cached is None:
        pytest.skip("this kernel does not tell what is in the page cache")
    assert facts.cached == 1
    assert facts.nbytes == _NBYTES
    assert facts.kind
    assert facts.read_s is None


def test_object_in_shared_memory_is_not_measured():
    fd = os.memfd_create("shard")
    try:
        os.ftruncate(fd, _NBYTES)
        assert examine(fd).read_s is None or examine(fd).read_s < 0.1
    finally:
        os.close(fd)


@pytest.mark.parametrize(("least", "count"), [(_NBYTES, 3), (_NBYTES + 1, 1)])
def test_cold_file_is_measured_by_few_of_its_blocks(cold_fd, monkeypatch, least, count):
    reads = []
    preadv = os.preadv
    monkeypatch.setattr(reading, "_LARGE_NBYTES", least)
    monkeypatch.setattr(os, "preadv", lambda *given: reads.append(given[2]) or preadv(*given))
    facts = examine(cold_fd)
    assert facts.cached == 0
    assert facts.read_s > 0
    assert len(set(reads)) == len(reads) == count
    if facts.has_direct:
        assert cached_part(cold_fd, _NBYTES) == 0


def test_file_that_was_cut_short_is_not_measured(cold_fd):
    os.ftruncate(cold_fd, READ_NBYTES)
    assert examine(cold_fd).read_s is None  # small now


def test_descriptor_for_direct_reads_reads_the_same_file(fd):
    direct = open_direct(fd)
    if direct is None:
        pytest.skip("this file system has no O_DIRECT")
    try:
        assert os.fstat(direct).st_ino == os.fstat(fd).st_ino
    finally:
        os.close(direct)


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
    (disk / "queue" / "rotational").write_text("0\n")
    assert not is_rotational(os.makedev(8, 1), links)
