"""A file is replaced whole or not at all, and survives a power failure if it was synced."""

import os

import pytest

from shmload._host.files import replacing


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    return path


def test_block_that_raises_changes_nothing(path):
    with pytest.raises(ZeroDivisionError), replacing(path) as file:
        file.write(b"%d" % (1 // 0))
    assert path.read_bytes() == b"before"
    assert os.listdir(path.parent) == ["file"]


@pytest.mark.parametrize("durable", [True, False])
def test_durable_file_is_on_its_disk_before_it_has_its_name(path, monkeypatch, durable):
    calls = []
    for name in ("fsync", "rename"):
        monkeypatch.setattr(os, name, recorded(getattr(os, name), name, calls))
    with replacing(path, durable=durable) as file:
        file.write(b"after")
    assert calls == (
        [("fsync", b"after"), "rename", ("fsync", "directory")] if durable else ["rename"]
    )


def recorded(call, name, calls):
    def noted(*args):
        calls.append((name, content_of(args[0])) if name == "fsync" else name)
        return call(*args)

    return noted


def content_of(fd):
    path = f"/proc/self/fd/{fd}"
    if os.path.isdir(path):
        return "directory"
    with open(path, "rb") as file:
        return file.read()
