"""The service's socket: other files in its place are kept, and the error is one sentence."""

import contextlib
import os
import socket
import tempfile
from pathlib import Path

import pytest
from privileges import no_privileges

from shmload._service import endpoint
from shmload._service.endpoint import Endpoint, connect, lock_path, socket_path
from shmload.errors import PeerRefused, ServiceRunning, ServiceUnavailable, SocketUnusable

REMEDY = "; choose a directory of your own with SHMLOAD_SOCKET"


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder / "service.sock"


def refusal(path):
    """Return why the service cannot listen there, from the error between path and remedy."""
    with pytest.raises(SocketUnusable) as caught:
        Endpoint(path)
    sentence = str(caught.value)
    assert sentence.startswith(f"cannot listen at {path}: ")
    assert sentence.endswith(REMEDY)
    assert "\n" not in sentence
    return sentence


def test_file_at_the_path_is_left(path):
    path.write_text("precious")
    assert "not a socket" in refusal(path)
    assert path.read_text() == "precious"


def test_directory_and_link_at_the_path_are_left(path):
    path.mkdir()
    assert "it is a directory" in refusal(path)
    link = path.with_name("link")
    link.symlink_to("nowhere")
    assert "not a socket" in refusal(link)
    assert link.is_symlink()


def test_socket_of_a_dead_service_is_taken_over(path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with contextlib.closing(Endpoint(path)):
        assert path.is_socket()


def test_path_that_no_socket_can_have(path):
    assert "longer than 107 bytes" in refusal(path.with_name("x" * 107))
    assert os.listdir(path.parent) == []


def test_directory_that_cannot_be_made(path):
    (path.parent / "file").touch()
    assert "Not a directory" in refusal(path.parent / "file" / "run" / "service.sock")
    assert "not a directory" in refusal(path.parent / "file" / "service.sock")


def test_lock_file_that_is_none(path):
    os.mkfifo(lock_path(path))
    assert f"{lock_path(path)} is not a regular file; remove it" in refusal(path)


def test_directory_that_may_not_be_made(open_folder):
    open_folder.chmod(0o555)
    with no_privileges():
        assert f"{open_folder}/run: Permission denied" in refusal(open_folder / "run/service.sock")
    open_folder.chmod(0o777)


def test_exchanged_directory_gets_no_socket_and_loses_no_file(path):
    endpoint = Endpoint(path)
    moved = path.parent.rename(path.parent.with_name("moved"))
    path.parent.mkdir(mode=0o700)
    path.touch()
    endpoint.close()
    assert path.is_file()
    assert os.listdir(moved) == ["service.lock"]


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_service_in_a_directory_that_others_enter_is_not_used(path, mode):
    with contextlib.closing(Endpoint(path)):
        path.parent.chmod(mode)
        with pytest.raises(ServiceUnavailable, match="lets others in"):
            connect(path, 1)
        path.parent.rename(path.parent.with_name("moved")).chmod(0o700)
        path.parent.symlink_to("moved")
        with pytest.raises(ServiceUnavailable, match="is not a directory"):
            connect(path, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_directory_of_another_user(path):
    os.chown(path.parent, 65534, -1)
    assert "belongs to user 65534" in refusal(path)


@pytest.fixture
def open_folder():
    """A directory that every user may enter and write to; those of pytest are closed."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)


def test_directory_that_this_user_may_not_enter(open_folder):
    folder = open_folder / "run"
    folder.mkdir(mode=0)
    with no_privileges():
        is_own = folder.stat().st_uid == os.geteuid()
        why = "closed to its owner (`chmod 700" if is_own else "belongs to user 0"
        assert why in refusal(folder / "service.sock")
        assert "Permission denied" in refusal(folder / "below" / "service.sock")
        with pytest.raises(ServiceUnavailable) as caught:
            connect(folder / "service.sock", 1)
    assert f"{folder} {'is closed to its owner' if is_own else 'belongs to user 0'}" in str(
        caught.value
    )
    folder.chmod(0o700)


def test_directory_is_private_and_open_to_its_owner_whatever_the_umask(open_folder):
    path = open_folder / "above" / "run" / "service.sock"
    before = os.umask(0o777)
    try:
        with no_privileges():
            for _ in range(2):
                with contextlib.closing(Endpoint(path)):
                    assert path.stat().st_mode & 0o777 == 0o600
    finally:
        os.umask(before)
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_chmod_is_advised_for_the_services_own_directory_only(path, monkeypatch):
    path.parent.chmod(0o755)
    assert "`chmod" not in refusal(path)
    monkeypatch.setattr(endpoint, "default_path", lambda: path)
    assert f"`chmod 700 {path.parent}`" in refusal(path)
    assert path.parent.stat().st_mode & 0o777 == 0o755


def test_relative_path_is_that_of_the_working_directory(configure, monkeypatch, tmp_path):
    configure(socket="rel.sock")
    monkeypatch.chdir(tmp_path)
    assert socket_path() == tmp_path / "rel.sock"


def test_one_service_per_directory(path):
    with contextlib.closing(Endpoint(path)):
        with pytest.raises(ServiceRunning, match=f"running at {path} "):
            Endpoint(path)
        with pytest.raises(ServiceRunning, match="another name; choose another directory"):
            Endpoint(path.with_name("other.sock"))


def test_client_says_why_no_service_can_be_there(path):
    path.parent.chmod(0o755)
    with pytest.raises(ServiceUnavailable) as caught:
        connect(path, 1)
    assert (
        str(caught.value) == f"no service answers at {path}: {path.parent} lets others in{REMEDY}"
    )


def test_service_of_another_user_is_named_with_a_remedy(path, monkeypatch):
    monkeypatch.setattr(endpoint, "peer_of", lambda _: (7, os.geteuid() + 1))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(PeerRefused) as caught:
            connect(path, 1)
    user = os.geteuid() + 1
    assert str(caught.value) == f"the service at {path} is of process 7, user {user}{REMEDY}"


def test_socket_of_systemd_is_where_the_service_listens(path, monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        monkeypatch.setattr(endpoint, "_inherited_socket", listener.dup)
        other = tmp_path / "other" / "service.sock"
        with contextlib.closing(Endpoint(other)) as found:
            assert found.path == path
        assert not other.parent.exists()
        (tmp_path / "link").symlink_to(tmp_path)
        linked = tmp_path / "link" / path.relative_to(tmp_path)
        with contextlib.closing(Endpoint(linked)) as found:
            assert found.path == linked
