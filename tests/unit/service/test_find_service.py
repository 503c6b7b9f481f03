"""A load finds the service to use, or knows that there is none."""

import os

import pytest
from privileges import no_privileges

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
        yield
    folder.chmod(0o700)


@pytest.mark.usefixtures("closed_runtime_dir")
def test_directory_of_another_user_is_no_service(configure):
    configure(service="auto", socket="")
    with pytest.raises(PermissionError):
        os.stat(os.path.join(os.environ["XDG_RUNTIME_DIR"], "shmload"))
    assert find_service() is None
    configure(service="require")
    with pytest.raises(ServiceUnavailable, match=r"belongs to user 0|closed to its owner"):
        find_service()
