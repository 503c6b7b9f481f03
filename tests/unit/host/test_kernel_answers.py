"""Every function over a system call handles each of the kernel's answers."""

import ctypes
import mmap
import os
import stat

import pytest
from privileges import no_privileges

from shmload._host.descriptors import try_lock, unlock, wait_lock
from shmload._host.files import open_source
from shmload._host.memory import PAGE_NBYTES, free_pages, populate
from shmload._host.pagemap import is_touched
from shmload._host.shm import SHM_DIR, is_named, shm_open, shm_rename, shm_unlink
from shmload._ipc.procs import has_pidfds
from shmload.errors import SegmentUntrusted, ShardMissing, ShardUnreadable

# Names --------------------------------------------------------------------------------------------


def test_object_that_is_not_there_is_none(name):
    assert shm_open(name) is None
    assert shm_open(name, writable=True) is None


@pytest.mark.parametrize("umask", [0, 0o022, 0o777])
def test_created_object_is_private_whatever_the_umask(name, umask):
    before = os.umask(umask)
    try:
        fd = shm_open(name, create=True, writable=True)
    finally:
        os.umask(before)
    found = os.stat(SHM_DIR / name)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == 0
    os.close(fd)


def test_descriptor_is_not_inherited_and_reads_or_writes_as_asked(fd, name):
    assert not os.get_inheritable(fd)
    assert os.pwrite(fd, b"x", 0) == 1
    reader = shm_open(name)
    assert os.pread(reader, 1, 0) == b"x"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(reader, b"y", 0)
    os.close(reader)


def plant_link(path):
    path.symlink_to("/etc/passwd")


def plant_dangling_link(path):
    path.symlink_to("/dev/shm/nothing-there")


def plant_fifo(path):
    os.mkfifo(path)


def plant_directory(path):
    path.mkdir()


def plant_open_file(path):
    path.write_bytes(b"evil")
    path.chmod(0o644)


def plant_anothers_file(path):
    path.write_bytes(b"evil")
    path.chmod(0o600)
    os.chown(path, 65534, 65534)


def plant_anothers_fifo(path):
    plant_fifo(path)
    os.chown(path, 65534, 65534)


_NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.mark.timeout(10)  # opening a FIFO can block forever
@pytest.mark.parametrize("kwargs", [{}, {"writable": True}, {"create": True, "writable": True}])
@pytest.mark.parametrize(
    "plant",
    [
        plant_link,
        plant_dangling_link,
        plant_fifo,
        plant_directory,
        plant_open_file,
        pytest.param(plant_anothers_file, marks=_NEEDS_ROOT),
        pytest.param(plant_anothers_fifo, marks=_NEEDS_ROOT),
    ],
)
def test_planted_name_is_not_trusted(name, plant, kwargs):
    plant(SHM_DIR / name)
    with pytest.raises(SegmentUntrusted, match=rf"/dev/shm/{name} is not trusted: .* remove it"):
        shm_open(name, **kwargs)
    assert os.path.lexists(SHM_DIR / name)


@_NEEDS_ROOT
def test_name_that_another_user_has_is_not_replaced(name):
    new = name[:-1] + ("0" if name[-1] != "0" else "1")
    plant_anothers_file(SHM_DIR / new)
    os.chown(SHM_DIR / new, 1, 1)
    with no_privileges():
        os.close(shm_open(name, create=True, writable=True))
        with pytest.raises(SegmentUntrusted, match=f"/dev/shm/{new} is not trusted"):
            shm_rename(name, new)
        shm_unlink(name)
    assert (SHM_DIR / new).read_bytes() == b"evil"
    shm_unlink(new)


def test_rename_is_seen_by_the_descriptor(fd, name):
    assert is_named(fd, name)
    other = name[:-1] + ("0" if name[-1] != "0" else "1")
    shm_rename(name, other)
    assert not is_named(fd, name)
    assert is_named(fd, other)
    os.close(shm_open(name, create=True, writable=True))
    assert not is_named(fd, name)  # another object of that name


# Locks --------------------------------------------------------------------------------------------


def test_shared_locks_exclude_an_exclusive_one(fd, name):
    first, second = shm_open(name), shm_open(name)
    try:
        assert try_lock(first, exclusive=False)
        assert try_lock(second, exclusive=False)
        assert not try_lock(fd, exclusive=True)
        unlock(first)
        assert not try_lock(fd, exclusive=True)
        unlock(second)
        assert try_lock(fd, exclusive=True)
        assert not try_lock(first, exclusive=False)
    finally:
        os.close(first)
        os.close(second)


def test_waiting_for_a_lock_ends_with_the_lock_or_the_deadline(fd, name):
    other = shm_open(name)
    try:
        assert try_lock(other, exclusive=True)
        assert not wait_lock(fd, exclusive=False, timeout_s=0.03)
    finally:
        os.close(other)
    assert wait_lock(fd, exclusive=False, timeout_s=0.0)


# Source files -------------------------------------------------------------------------------------


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["fifo", "directory", "socket", "/dev/null", "/dev/tty"])
def test_source_that_is_no_regular_file_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "shard"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        path = kind
    with pytest.raises(ShardUnreadable, match=str(path)):
        open_source(path)


def test_source_that_is_missing_is_missing(tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("nothing", "dangling"):
        with pytest.raises(ShardMissing, match=str(tmp_path / name)):
            open_source(tmp_path / name)
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ShardUnreadable, match="symbolic links"):
        open_source(tmp_path / "loop")


# The process and its kernel -----------------------------------------------------------------------


def test_pidfds_are_tried(monkeypatch):
    assert has_pidfds()

    def forbid(*_):
        raise PermissionError

    monkeypatch.setattr("os.pidfd_open", forbid)
    assert not has_pidfds()


def test_populated_pages_are_there_before_they_are_read():
    content = mmap.mmap(-1, 64 * PAGE_NBYTES)
    start = ctypes.addressof(ctypes.c_char.from_buffer(content))
    assert not is_touched(start, start + len(content))
    if populate(start + 5, 8 * PAGE_NBYTES):  # Linux 5.14
        assert is_touched(start, start + PAGE_NBYTES)
        assert is_touched(start + 8 * PAGE_NBYTES, start + 9 * PAGE_NBYTES)
        assert not is_touched(start + 9 * PAGE_NBYTES, start + len(content))
    assert not populate(0, PAGE_NBYTES)  # nothing is mapped there


def test_freed_pages_read_as_zeros_and_take_no_memory():
    fd = os.memfd_create("pages")
    os.pwrite(fd, bytes([7]) * (4 * PAGE_NBYTES + 100), 0)
    content = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
    free_pages(fd, PAGE_NBYTES + 1, 3 * PAGE_NBYTES)  # the first one only in part
    assert os.fstat(fd).st_blocks * 512 == 4 * PAGE_NBYTES
    assert content[: 2 * PAGE_NBYTES] == bytes([7]) * 2 * PAGE_NBYTES
    assert content[2 * PAGE_NBYTES : 3 * PAGE_NBYTES] == bytes(PAGE_NBYTES)
    free_pages(fd, 0, len(content))
    assert os.fstat(fd).st_blocks * 512 == PAGE_NBYTES  # the last one, which is not whole
    assert content[:] == bytes(len(content))
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        free_pages(fd, 0, PAGE_NBYTES)
