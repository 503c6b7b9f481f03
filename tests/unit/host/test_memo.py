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
    Memo("kind", dict[str, int], "others").write({"planted": 1})
    (path.parent / Memo("kind", dict[str, int], "others").key).rename(path)


def replace_by_link(path):
    shutil.move(path, path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def replace_by_pipe(path):
    path.unlink()
    os.mkfifo(path)


HARMS = {
    "truncated": lambda path: os.truncate(path, 5),
    "empty": lambda path: os.truncate(path, 0),
    "flipped": flip,
    "of another key": replace_by_another_key,
    "link": replace_by_link,
    "pipe": replace_by_pipe,
    "removed": lambda path: path.unlink(),
    "group may write": lambda path: path.chmod(0o660),
    "all may write": lambda path: path.chmod(0o606),
    "group may write to folder": lambda path: path.parent.chmod(0o770),
    "all may write to folder": lambda path: path.parent.chmod(0o703),
    "folder removed": lambda path: shutil.rmtree(path.parent),
    "cache removed": lambda path: shutil.rmtree(path.parent.parent),
}


def test_value_is_read_by_those_with_the_same_facts_until_it_is_forgotten(memo):
    assert memo.read() is None
    assert memo.write({"a": 1})
    assert Memo("kind", dict[str, int], ("facts", 1)).read() == {"a": 1}
    assert Memo("kind", dict[str, int], ("facts", 2)).read() is None
    assert Memo("other", dict[str, int], ("facts", 1)).key != memo.key
    memo.forget()
    memo.forget()
    assert memo.read() is None


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_harmed_value_is_not_believed_and_is_replaced(memo, harm):
    memo.write({"a": 1})
    harm(memo.folder / memo.key)
    assert memo.read() is None
    assert memo.write({"a": 2})
    assert memo.read() == {"a": 2}


@is_root
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_value_of_another_user_is_not_believed_and_is_replaced(memo, mode):
    memo.write({"planted": 1})
    (memo.folder / memo.key).chmod(mode)
    os.chown(memo.folder / memo.key, 65534, 65534)
    assert memo.read() is None
    memo.write({"a": 1})
    assert memo.read() == {"a": 1}


@is_root
def test_folder_of_another_user_is_not_used_and_the_log_says_it_once(memo, caplog):
    memo.write({"planted": 1})
    os.chown(memo.folder, 65534, 65534)
    caplog.set_level("INFO", "shmload")
    for _ in range(3):
        assert memo.read() is None
        assert not memo.write({"a": 1})
    assert [text.split(": ")[:2] for text in caplog.messages] == [
        [f"what is remembered in {memo.folder.parent} is {what}", each]
        for what in ("not used", "not written")
        for each in [f"{memo.folder} belongs to another user; {_REMEDY}"]
    ]


def test_folder_that_is_a_link_is_not_used(memo, tmp_path):
    memo.write({"a": 1})
    memo.folder.rename(tmp_path / "elsewhere")
    memo.folder.symlink_to(tmp_path / "elsewhere")
    assert memo.read() is None
    assert not memo.write({"a": 1})


def test_only_this_user_reads_and_writes_it(memo):
    before = os.umask(0)
    try:
        memo.write({"a": 1})
    finally:
        os.umask(before)
    found = [memo.folder.parent, memo.folder, memo.folder / memo.key]
    assert [path.stat().st_mode & 0o777 for path in found] == [0o700, 0o700, 0o600]


def test_files_of_the_user_in_a_folder_that_was_open_stay(memo):
    memo.write({"a": 1})
    (memo.folder / "notes.txt").touch()
    memo.folder.chmod(0o777)
    memo.write({"a": 2})
    assert {path.name for path in memo.folder.iterdir()} == {"notes.txt", memo.key}


def test_least_recently_written_values_go(memo):
    few = [Memo("kind", dict[str, int], number, most=3) for number in range(4)]
    for number, each in enumerate(few[:3]):
        each.write({"number": number})
        os.utime(each.folder / each.key, ns=(number, number))
    few[3].write({"number": 3})
    left = [number for number, each in enumerate(few) if each.read()]
    assert left == [1, 2, 3]


def test_place_that_cannot_be_written_is_said_once(memo, configure, caplog):
    configure(cache_dir="/proc/nowhere")
    caplog.set_level("INFO", "shmload")
    for number in range(3):
        nowhere = Memo(f"kind{number}", dict[str, int], number)
        assert not nowhere.write({})
        assert nowhere.read() is None
        nowhere.forget()
    (said,) = caplog.messages
    assert "/proc/nowhere is not written" in said
    assert "SHMLOAD_CACHE_DIR" in said
