"""logind's files say whether a user's shared memory outlives the last logout."""

import os

import pytest

from shmload._host.logind import removes_ipc

USER = 60001


@pytest.fixture
def root(tmp_path):
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    return tmp_path


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_default_is_removal(root):
    assert removes_ipc(USER, root)


@pytest.mark.parametrize("uid", [0, 999])
def test_system_users_are_exempt(root, uid):
    assert not removes_ipc(uid, root)


def test_machine_without_systemd_removes_nothing(tmp_path):
    assert not removes_ipc(USER, tmp_path)


def test_user_who_lingers_keeps_the_memory(root):
    write(root, f"var/lib/systemd/linger/{USER}", "")
    assert not removes_ipc(USER, root)


@pytest.mark.parametrize(
    ("files", "is_removed"),
    [
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, False),
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, True),
        (
            {
                "etc/systemd/logind.conf": "RemoveIPC=no",
                "usr/lib/systemd/logind.conf.d/10.conf": "RemoveIPC = yes",
            },
            True,
        ),
        (
            {
                "usr/lib/systemd/logind.conf.d/10.conf": "RemoveIPC=yes",
                "etc/systemd/logind.conf.d/10.conf": "RemoveIPC=no",
            },
            False,
        ),
        (
            {
                "etc/systemd/logind.conf.d/20.conf": "RemoveIPC=off",
                "etc/systemd/logind.conf.d/10.conf": "RemoveIPC=on",
            },
            False,
        ),
    ],
)
def test_last_file_decides(root, files, is_removed):
    for path, text in files.items():
        write(root, path, text)
    assert removes_ipc(USER, root) is is_removed


def test_this_machine_can_be_asked():
    assert removes_ipc(os.getuid()) in (True, False)
