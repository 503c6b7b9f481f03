"""Every function over a system call handles each of the kernel's answers."""

import os
import stat

import pytest
from privileges import no_privileges

from shmload._host.files import open_source
from shmload._host.shm import SHM_DIR, shm_open, shm_rename, shm_unlink
from shmload.errors import SegmentUntrusted, ShardUnreadable

# Names --------------------------------------------------------------------------------------------


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


def plant_file(path, mode, owner):
    path.write_bytes(b"evil")
    path.chmod(mode)
    os.chown(path, owner, -1)


def plant_fifo(path, owner=-1):
    os.mkfifo(path)
    os.chown(path, owner, -1)


_ME, _OTHER = os.geteuid(), 65534
_NEEDS_ROOT = pytest.mark.skipif(_ME != 0, reason="only root can give a file away")
PLANTS = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "dangling link": lambda path: path.symlink_to("/dev/shm/nothing-there"),
    "FIFO": plant_fifo,
    "directory": lambda path: path.mkdir(),
    "file that others may read": lambda path: plant_file(path, 0o644, _ME),
    "file of another": lambda path: plant_file(path, 0o600, _OTHER),
    "FIFO of another": lambda path: plant_fifo(path, _OTHER),
}


@pytest.mark.timeout(10)  # opening a FIFO can block forever
@pytest.mark.parametrize("kwargs", [{}, {"writable": True}, {"create": True, "writable": True}])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=_NEEDS_ROOT if "another" in kind else ()) for kind in PLANTS],
)
def test_planted_name_is_not_trusted(name, kind, kwargs):
    PLANTS[kind](SHM_DIR / name)
    with pytest.raises(SegmentUntrusted, match=rf"/dev/shm/{name} is not trusted: .* remove it"):
        shm_open(name, **kwargs)
    assert os.path.lexists(SHM_DIR / name)


@_NEEDS_ROOT
def test_name_that_another_user_has_is_not_replaced(name):
    new = name[:-1] + ("0" if name[-1] != "0" else "1")
    plant_file(SHM_DIR / new, 0o600, 1)
    with no_privileges():
        os.close(shm_open(name, create=True, writable=True))
        with pytest.raises(SegmentUntrusted, match=f"/dev/shm/{new} is not trusted"):
            shm_rename(name, new)
        shm_unlink(name)
    assert (SHM_DIR / new).read_bytes() == b"evil"
    shm_unlink(new)


# Locks --------------------------------------------------------------------------------------------


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
