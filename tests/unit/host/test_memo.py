"""What is remembered is believed only if this user has written it, whole; else it is found anew."""

import os
import shutil

import pytest

from shmload._host.memo import Memo, _say

_REMEDY = "another place can be chosen with SHMLOAD_CACHE_DIR"
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


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


@is_root
def test_value_of_another_user_is_not_believed_and_the_log_says_it_once(memo, caplog):
    memo.write({"planted": 1})
    os.chown(memo.path, 65534, 65534)
    caplog.set_level("INFO", "shmload")
    assert [memo.read() for _ in range(3)] == [None] * 3
    assert caplog.messages == [
        f"what is remembered in {memo.path.parent.parent} is not used: {memo.path} belongs to user "
        f"65534; {_REMEDY}"
    ]
    memo.write({"a": 1})
    assert memo.read() == {"a": 1}


def test_place_that_cannot_be_written_is_said_once(memo, configure, caplog):
    configure(cache_dir="/proc/nowhere")
    caplog.set_level("INFO", "shmload")
    for number in range(3):
        nowhere = Memo(f"kind{number}", dict[str, int], number)
        nowhere.write({})
        assert nowhere.read() is None
        nowhere.forget()
    (said,) = caplog.messages
    assert "/proc/nowhere is not written" in said
    assert "SHMLOAD_CACHE_DIR" in said
