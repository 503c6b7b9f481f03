"""Directories that decide who is talked to: only this user's own, which no other can exchange."""

import fcntl
import os

import pytest

from shmload._host import private
from shmload._host.private import open_private, private_path, runtime_folder
from shmload._templates import place

_OTHER = 65534
needs_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """What /tmp is to this test; returns this user's directory in it."""
    shared = tmp_path / "tmp"
    shared.mkdir(mode=0o700)
    monkeypatch.setattr(private, "_ELSE", str(shared))
    return str(shared / f"shmload-{os.geteuid()}")


@pytest.fixture
def runtime(tmp_path, monkeypatch, elsewhere):
    base = tmp_path / "above" / "runtime"
    base.mkdir(mode=0o700, parents=True)
    base.parent.chmod(0o755)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    return base


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_runtime_directory_of_this_user_is_taken(runtime, mode):
    runtime.chmod(mode)
    assert runtime_folder() == f"{runtime}/shmload"


_FOREIGN = {
    "of another user": lambda base: os.chown(base, _OTHER, -1),
    "as /tmp": lambda base: base.chmod(0o1777),
    "of a group": lambda base: base.chmod(0o770),
    "below one of another user": lambda base: os.chown(base.parent, _OTHER, -1),
    "below one that others write to": lambda base: base.parent.chmod(0o777),
    "a file": lambda base: (base.rmdir(), base.touch()),
    "missing": lambda base: base.rmdir(),
}


@needs_another_user
@pytest.mark.parametrize("how", _FOREIGN)
def test_runtime_directory_that_another_user_could_exchange_is_left(runtime, elsewhere, how):
    _FOREIGN[how](runtime)
    assert runtime_folder() == elsewhere
    assert place.folder() == f"{elsewhere}/templates"
    assert oct(os.stat(elsewhere).st_mode & 0o777) == "0o700"
    assert not (runtime / "shmload").exists()


def test_planted_link_is_not_followed(runtime, tmp_path):
    (tmp_path / "mine").mkdir()
    (runtime / "shmload").symlink_to(tmp_path / "mine")
    with pytest.raises(PermissionError, match=f"^{runtime}/shmload is not a directory$"):
        private_path(f"{runtime}/shmload/templates")
    assert os.listdir(tmp_path / "mine") == []
    with pytest.raises(NotADirectoryError):
        open_private(f"{runtime}/shmload", make=True)


@needs_another_user
def test_link_that_appears_in_tmp_meanwhile_is_not_followed(tmp_path, monkeypatch, elsewhere):
    os.chmod(os.path.dirname(elsewhere), 0o1777)
    makedirs = os.makedirs

    def plant(path, *args, **kwargs):
        if not os.path.lexists(elsewhere):
            os.symlink(tmp_path, elsewhere)
            os.lchown(elsewhere, _OTHER, _OTHER)
        makedirs(path, *args, **kwargs)

    monkeypatch.setattr(os, "makedirs", plant)
    with pytest.raises(PermissionError, match="is not a directory"):
        private_path(f"{elsewhere}/templates")
    assert not (tmp_path / "templates").exists()


def test_exchanging_an_open_directory_changes_nothing(runtime):
    path = runtime / "shmload"
    fd = open_private(str(path), make=True)
    try:
        moved = path.rename(runtime / "moved")
        path.mkdir()
        with open(f"/proc/self/fd/{fd}/a file", "w"):
            pass
    finally:
        os.close(fd)
    assert os.listdir(moved) == ["a file"]
    assert os.listdir(path) == []


@pytest.mark.usefixtures("runtime")
def test_callers_may_look_at_a_time_whether_there_is_a_template():
    with open(f"{place.socket_of('key')}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert not place.is_taken("key")
        fcntl.flock(file, fcntl.LOCK_EX)
        assert place.is_taken("key")
