"""What is remembered is believed only if this user has written it, whole; else it is found anew."""

import os
import shutil

import pytest

from shmload._host.memo import Memo, _say


@pytest.fixture
def memo(configure, tmp_path):
    configure(cache_dir=tmp_path / "cache")
    _say.cache_clear()  # other tests have places that cannot be written, too
    return Memo("kind", dict[str, int], ("facts", 1))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def replace_by_another_key(path):
    other = Memo("kind", dict[str, int], "others")
    other.write({"planted": 1})
    other.path.rename(path)


def replace_by_link(path):
    shutil.move(path, path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path, 0o600)


HARMS = {
    "truncated": lambda path: os.truncate(path, 5),
    "flipped": flip,
    "of another key": replace_by_another_key,
    "link": replace_by_link,
    "pipe": replace_by_pipe,
    "removed": lambda path: path.unlink(),
    "others may write": lambda path: path.chmod(0o606),
    "cache removed": lambda path: shutil.rmtree(path.parent.parent),
}


def test_value_is_read_by_those_with_the_same_facts_until_it_is_forgotten(memo):
    assert memo.read() is None
    memo.write({"a": 1})
    assert Memo("kind", dict[str, int], ("facts", 1)).read() == {"a": 1}
    assert Memo("kind", dict[str, int], ("facts", 2)).read() is None
    assert memo.path.stat().st_mode & 0o777 == 0o600
    memo.forget()
    memo.forget()
    assert memo.read() is None


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_harmed_value_is_not_believed_and_is_replaced(memo, harm):
    memo.write({"a": 1})
    harm(memo.path)
    assert memo.read() is None
    memo.write({"a": 2})
    assert memo.read() == {"a": 2}
