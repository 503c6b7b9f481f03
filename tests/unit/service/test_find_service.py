"""A load finds the service to use, or knows that there is none."""

import os
import socket

import pytest
from privileges import no_privileges

from shmload._service import client
from shmload._service.client import find_service
from shmload.errors import ServiceUnavailable


@pytest.fixture
def closed_runtime_dir(tmp_path, monkeypatch):
    """An XDG_RUNTIME_DIR that this process may not enter, as after `sudo -E -u other`."""
    folder = tmp_path / "runtime"
    (folder / "shmload").mkdir(parents=True)
    folder.chmod(0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    with no_privileges():
        yield folder
    folder.chmod(0o700)


def test_directory_of_another_user_is_no_service(configure, closed_runtime_dir):
    path = closed_runtime_dir / "shmload" / "service.sock"
    configure(service="auto", socket="")
    with pytest.raises(PermissionError):
        os.stat(path.parent)
    assert find_service() is None
    configure(service="require")
    with pytest.raises(ServiceUnavailable, match=f"/shmload-{os.geteuid()}/service.sock: "):
        find_service()
    configure(socket=path)
    with pytest.raises(ServiceUnavailable, match=r"belongs to user 0|closed to its owner"):
        find_service()


def test_service_that_hangs_is_told_once(configure, monkeypatch, tmp_path, caplog):
    configure(service="auto", socket=tmp_path / "service.sock", service_timeout_s=0.2)
    monkeypatch.setattr(client, "_told", set())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "service.sock"))
        listener.listen()
        assert find_service() is None
        assert find_service() is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "does not answer in 0.2 s" in record.message
    assert record.message.endswith("; loading without it")


def test_socket_of_a_dead_service_is_no_warning(configure, tmp_path, caplog):
    configure(service="auto", socket=tmp_path / "service.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "service.sock"))
    assert find_service() is None
    assert not caplog.records
