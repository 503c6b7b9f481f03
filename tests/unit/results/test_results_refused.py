"""A results folder refuses bad runs and items with the right error, and stays intact."""

import errno
import os
import resource

import numpy as np
import pytest
from storing import COUNT, FACTS, SHARD_ITEMS, arrays_of, content_of, key_of, run

import shmload
from shmload._results.names import FORMATS, KeyDigests, digest_key
from shmload.integrations.results import Array, ResultFolder


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "results"


def opened(folder, **changes):
    return ResultFolder(folder, **{"shard_items": SHARD_ITEMS, "facts": FACTS} | changes)


# Another run --------------------------------------------------------------------------------------


def test_second_run_is_refused_at_once_and_named(folder):
    with opened(folder) as results:
        with pytest.raises(shmload.ResultsBusy, match=f"process {os.getpid()}"):
            opened(folder)
        results.add(0, key_of(0), arrays_of(0))
    run(folder, range(COUNT))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"facts": FACTS | {"dtype": "float16"}},
            "fact 'dtype' is 'bfloat16' there, and 'float16' now",
        ),
        ({"facts": FACTS | {"seed": "1"}}, "fact 'seed' is None there, and '1' now"),
        ({"facts": {"dtype": "bfloat16"}}, "fact 'weights' is 'sha256=0' there, and None now"),
        ({"shard_items": 5}, "shard_items is 4 there, and 5 now"),
    ],
)
def test_other_facts_are_refused_and_named(folder, serial, changes, says):
    run(folder, range(COUNT))
    with pytest.raises(shmload.ResultsMismatch, match=says) as caught:
        opened(folder, **changes)
    assert "give another folder, or the items and facts of before" in str(caught.value)
    assert content_of(folder) == serial


def test_facts_of_a_run_that_stored_nothing_do_not_bind_the_next(folder, serial):
    opened(folder, facts={"size": "1"}, shard_items=1).close()
    run(folder, range(COUNT))
    assert content_of(folder) == serial


def test_order_of_facts_makes_no_difference(folder, serial):
    run(folder, range(COUNT), facts=dict(reversed(FACTS.items())))
    assert run(folder, range(COUNT)).added == 0
    assert content_of(folder) == serial


# Items --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("finished", [True, False])
def test_item_with_another_key_than_before_is_refused(folder, finished):
    if finished:
        run(folder, range(COUNT))
    else:
        with opened(folder) as results:
            results.add(1, key_of(1), arrays_of(1))
    with opened(folder) as results:
        for ask in (
            lambda: results.is_done(1, "new"),
            lambda: results.add(1, "new", {}),
            lambda: results.fail(1, "new", ""),
        ):
            with pytest.raises(shmload.ResultsMismatch, match="item 1 was 'a/1") as caught:
                ask()
            assert "is 'new' now" in str(caught.value)


def test_key_that_changes_within_a_run_is_refused(folder):
    with opened(folder) as results:
        results.is_done(0, "a")
        with pytest.raises(shmload.ResultsMismatch, match="item 0 had another key and is 'b' now"):
            results.add(0, "b", {})


@pytest.mark.parametrize("second", [1, 3000])
def test_key_of_two_items_is_refused(folder, second):
    with opened(folder) as results:
        results.add(0, "a", {})
        with pytest.raises(
            shmload.DuplicateKey, match=f"items 0 and {second} have the same key 'a'"
        ):
            results.is_done(second, "a")
        assert not results.is_done(second, "b")


def test_key_of_a_new_item_and_a_stored_one_is_refused(folder):
    with opened(folder) as results:
        results.add(SHARD_ITEMS, "a", {})
    with opened(folder) as results:
        assert not results.is_done(0, "a")
        with pytest.raises(shmload.DuplicateKey, match=f"items 0 and {SHARD_ITEMS} have"):
            results.is_done(SHARD_ITEMS, "a")


def test_item_that_is_there_is_refused(folder, serial):
    with opened(folder) as results:
        results.add(0, key_of(0), arrays_of(0))
        with pytest.raises(shmload.ArgumentError, match=r"item 0, 'img0\.png', was added before"):
            results.add(0, key_of(0), {})
        with pytest.raises(shmload.ArgumentError, match="was added before"):
            results.fail(0, key_of(0), "late")
    run(folder, range(COUNT))
    assert content_of(folder) == serial


def test_missing_item_is_named(folder):
    with opened(folder) as results:
        for index in (0, 1, 2, 3, 4, 6):
            results.add(index, key_of(index), arrays_of(index))
        with pytest.raises(shmload.ArgumentError, match="item 5 of 7 was neither added nor did it"):
            results.finish(7)


def test_item_that_failed_before_must_be_tried_again(folder):
    run(folder, range(COUNT), failing={2})
    with (
        opened(folder, retry_failed=True) as results,
        pytest.raises(shmload.ArgumentError, match="item 2 of 10"),
    ):
        results.finish(COUNT)


@pytest.mark.parametrize("count", [9, 8, 7, 0])
def test_fewer_items_than_stored_are_refused(folder, serial, count):
    run(folder, range(COUNT))
    with opened(folder) as results, pytest.raises(shmload.ResultsMismatch, match="has an item"):
        results.finish(count)
    assert content_of(folder) == serial


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"a/b": Array("U8", (1,), b"x")}, "array name 'a/b' is empty, or has a slash"),
        ({"": Array("U8", (1,), b"x")}, "array name '' is empty, or has a slash"),
        ({"\ud800": Array("U8", (1,), b"x")}, "not text that UTF-8 can encode"),
        ({"a": Array("uint8", (1,), b"x")}, "array 'a': unknown dtype 'uint8'"),
        ({"a": Array("F32", (2,), b"1234")}, r"F32 of shape \[2\] does not have the 4 bytes"),
        ({"a": Array("F4", (1,), b"1")}, r"F4 of shape \[1\] does not have the 1 bytes"),
        ({"a": Array("U8", (-1, -1), b"1")}, "does not have the 1 bytes"),
        ({"a": Array("U8", (1,) * 65, b"1")}, "does not have the 1 bytes"),
        ({"a": Array("U8", (4,), np.zeros(8, np.uint8)[::2])}, "not in a row"),
        ({"a" * 30_000_000: Array("U8", (1,), b"1")}, "give shorter ones, or fewer shard_items"),
    ],
)
def test_array_that_cannot_be_one_is_refused(folder, serial, arrays, says):
    with opened(folder) as results:
        with pytest.raises(shmload.ArgumentError, match=says) as caught:
            results.add(0, key_of(0), arrays)
        assert "item 0" in str(caught.value)[:200]
    run(folder, range(COUNT))
    assert content_of(folder) == serial


def test_other_arguments_that_cannot_work_are_refused(folder):
    for shard_items in (0, -1, 10_001):
        with pytest.raises(shmload.ArgumentError, match="shard_items is"):
            opened(folder, shard_items=shard_items)
    with pytest.raises(shmload.ArgumentError, match="a fact is not text"):
        opened(folder, facts={"a": "\ud800"})
    with opened(folder) as results:
        with pytest.raises(shmload.ArgumentError, match="cannot have the number -1"):
            results.is_done(-1, "a")
        with pytest.raises(shmload.ArgumentError, match=r"'\\ud800' is not text"):
            results.is_done(0, "\ud800")
        with pytest.raises(shmload.ArgumentError, match=r"item 0, '\\ud800', or the name"):
            results.add(0, "\ud800", {})
    with pytest.raises(shmload.ArgumentError, match="was closed"):
        results.is_done(0, "a")
    results.close()


def test_longest_names_that_are_taken_fit_the_header(folder):
    items = 100
    key = "\x01" * 50_000
    with opened(folder, shard_items=items) as results:
        for index in range(items):
            results.add(index, f"{key}{index}", {"x": Array("U8", (1,), b"x")})
        assert results.finish(items).failed == 0
    with (
        pytest.raises(shmload.ArgumentError, match="too many for a file"),
        opened(folder, shard_items=items) as results,
    ):
        results.add(items, key * 2, {"x": Array("U8", (1,), b"x")})


def test_digests_are_found_again():
    digests = KeyDigests()
    numbers = [digest_key(str(number)) for number in range(5000)] + [1, (1 << 64) - 1]
    assert all(digests.add(number) for number in numbers)
    assert not any(digests.add(number) for number in numbers)


# Disks --------------------------------------------------------------------------------------------


def full_disk(monkeypatch, name, at):
    """Make a call fail half-way from its n-th time on; return a function that repairs it."""
    call, count = getattr(os, name), iter(range(at))

    def failing(fd, *args):
        if next(count, None) is not None:
            return call(fd, *args)
        if name == "pwrite":
            call(fd, args[0][:20], args[1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, name, failing)


# pwrite: heads of records, and each array that is not empty. fsync: files and directories.
# rename: shards, facts, index.
@pytest.mark.parametrize(("name", "count"), [("pwrite", 24), ("fsync", 10), ("rename", 5)])
def test_full_disk_is_an_error_and_the_run_goes_on_later(tmp_path, serial, name, count):
    for at in range(count + 1):
        folder = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            full_disk(patch, name, at)
            if at < count:
                with pytest.raises(shmload.ResultsInaccessible, match="No space left") as caught:
                    run(folder, range(COUNT))
                assert "it goes on where it was" in str(caught.value)
                assert str(folder) in str(caught.value)
                assert caught.value.errno == errno.ENOSPC
            else:
                run(folder, range(COUNT))
        assert not list(folder.glob("*.tmp"))
        run(folder, range(COUNT))
        assert content_of(folder) == serial


def test_same_run_goes_on_once_there_is_room(folder, serial):
    with opened(folder) as results:
        for index in range(COUNT):
            with pytest.MonkeyPatch.context() as patch:
                full_disk(patch, "pwrite", 0)
                with pytest.raises(shmload.ResultsInaccessible):
                    results.add(index, key_of(index), arrays_of(index))
            assert not results.is_done(index, key_of(index))
            results.add(index, key_of(index), arrays_of(index))
        results.finish(COUNT)
    assert content_of(folder) == serial


@pytest.mark.parametrize("format", FORMATS)
def test_limit_of_file_sizes_is_an_error_and_the_run_goes_on_later(folder, format):
    """The kernel refuses a write in the middle of a shard's data."""
    array = {"x": Array("U8", (100_000,), bytes(100_000))}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(folder, format=format) as results:
        for index in range(SHARD_ITEMS - 1):
            results.add(index, str(index), array)
        # More than the journal, less than the shard, whose data starts on a page.
        resource.setrlimit(resource.RLIMIT_FSIZE, (401_000, before[1]))
        try:
            with pytest.raises(shmload.ResultsInaccessible, match="File too large"):
                results.add(3, "3", array)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert results.is_done(3, "3")
        assert results.finish(SHARD_ITEMS).nbytes > 400_000
    assert sorted(content_of(folder)) == [
        ".lock",
        "index.jsonl",
        "results.json",
        f"shard-00000{FORMATS[format].suffix}",
    ]


def test_folder_that_is_a_file_is_an_error(folder):
    folder.write_text("")
    with pytest.raises(shmload.ResultsInaccessible, match=f"{folder} cannot be written or read"):
        opened(folder)


def test_folder_without_permission_is_an_error(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), args[0])

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(shmload.ResultsInaccessible, match="Permission denied"):
        opened(folder)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        ("shmload._results.journal.os.pwrite", "shard-00000.journal"),
        ("shmload._results.safetensors.build_header", "shard-00000.safetensors"),
        ("shmload._results.index._line", "index.jsonl"),
    ],
)
def test_full_disk_names_the_file(tmp_path, monkeypatch, step, name):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(step, full)
    with pytest.raises(shmload.ResultsInaccessible) as caught:
        run(tmp_path, [0])
    assert str(caught.value).startswith(f"{tmp_path / name} cannot be written")
    assert caught.value.errno == errno.ENOSPC
