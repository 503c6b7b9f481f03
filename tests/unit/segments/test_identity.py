"""Which files are the same: here and now, and on other hosts."""

import os

import pytest

from shmload._segments.names import identify, identify_anywhere

_SHA256 = "a" * 64


@pytest.fixture
def blob(tmp_path):
    """Make a file in a folder below the test's, under a digest as a name."""

    def make(folder):
        path = tmp_path / folder / (_SHA256[:32] if "remote" in folder else _SHA256)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
        return path

    return make


def keys(path):
    found = os.stat(path)
    return identify(path, found), identify_anywhere(path, found)


def foreign_keys(path):
    found = os.stat(path)
    found = os.stat_result([*found[:4], os.geteuid() + 1, *found[5:]])
    return identify(path, found), identify_anywhere(path, found)


def test_blob_in_the_mirror_of_a_bucket_is_known_by_its_name(blob):
    path = blob(f"remote/{'0' * 20}/blobs")
    before = keys(path)
    os.utime(path)
    assert keys(path) == before == (f"4:object={_SHA256[:32]}",) * 2


@pytest.mark.parametrize("folder", ["models--org--name/blobs", f"remote/{'0' * 20}/blobs"])
def test_name_that_another_user_has_given_says_nothing(blob, folder):
    """Whoever names a file by a digest need not have the bytes."""
    key, lasting = foreign_keys(blob(folder))
    assert key == lasting
    assert "sha256" not in key


def test_digest_as_a_name_elsewhere_says_nothing(blob):
    key, lasting = keys(blob("files"))
    assert key == lasting
    assert "sha256" not in key
