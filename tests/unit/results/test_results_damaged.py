"""Damage to a results folder is repaired or refused."""

import os

import pytest
from storing import COUNT, content_of, done_in, key_of, run, unfinished

import shmload
from shmload._results.names import FORMATS
from shmload.integrations.results import Array, ResultFolder, Results


def damage(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_journal_damaged_by_loss_of_power_is_cut(tmp_path, serial):
    damage(unfinished(tmp_path), -1)
    assert done_in(tmp_path) == [0, 1]
    run(tmp_path, range(COUNT))
    assert content_of(tmp_path) == serial


def test_any_damaged_byte_of_a_journal_is_found(tmp_path):
    path = unfinished(tmp_path)
    whole = path.read_bytes()
    for offset in range(0, len(whole), 2):
        path.write_bytes(whole)
        damage(path, offset)
        assert done_in(tmp_path) in ([], [0], [0, 1])
        assert whole.startswith(path.read_bytes())


def test_journal_of_zeros_is_made_again(tmp_path, serial):
    path = unfinished(tmp_path)
    path.write_bytes(bytes(1000))
    assert done_in(tmp_path) == []
    run(tmp_path, range(COUNT))
    assert content_of(tmp_path) == serial


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cut", [1, 10_240])
def test_file_of_a_finished_folder_that_is_cut_is_an_error(tmp_path, format, cut):
    with ResultFolder(tmp_path, facts={}, format=format) as results:
        results.add(0, "a", {"x": Array("U8", (20_000,), b"x" * 20_000)})
        results.finish(1)
    (path,) = tmp_path.glob("shard-*")
    os.truncate(path, path.stat().st_size - cut)
    with (
        ResultFolder(tmp_path, facts={}, format=format) as results,
        pytest.raises(shmload.ResultsCorrupt, match=r"shard-00000.* is damaged: .*; remove it"),
    ):
        results.is_done(0, "a")


def test_shards_without_their_facts_are_refused(tmp_path):
    run(tmp_path, range(COUNT))
    (tmp_path / "results.json").unlink()
    with pytest.raises(shmload.ResultsCorrupt, match=r"results\.json"):
        run(tmp_path, range(COUNT))


def test_what_is_not_ours_is_left_alone(tmp_path):
    for name in ("notes.txt", "shard-1.safetensors", "model.safetensors.12345678.tmp", "x.journal"):
        (tmp_path / name).write_text("mine")
    run(tmp_path, range(COUNT))
    assert [path.name for path in tmp_path.iterdir() if path.read_bytes() == b"mine"] != []
    assert sum(path.read_bytes() == b"mine" for path in tmp_path.iterdir()) == 4


def cut_at_a_line(content):
    return b"".join(content.splitlines(keepends=True)[:-3])


DAMAGED_INDEXES = {
    "empty": lambda content: b"",
    "lines gone": cut_at_a_line,
    "cut in a line": lambda content: content[:-5],
    "no last newline": lambda content: content[:-1],
    "zeros": lambda content: bytes(len(content)),
    "a line twice": lambda content: content + content.splitlines(keepends=True)[-1],
    "another key": lambda content: content.replace(key_of(2).encode(), key_of(3).encode()),
}


@pytest.mark.parametrize("name", DAMAGED_INDEXES)
def test_damaged_index_is_written_anew_by_the_next_run(tmp_path, serial, caplog, name):
    run(tmp_path, range(COUNT))
    path = tmp_path / "index.jsonl"
    path.write_bytes(DAMAGED_INDEXES[name](path.read_bytes()))
    assert content_of(tmp_path) != serial
    report = run(tmp_path, range(COUNT))
    assert report.added == 0
    assert content_of(tmp_path) == serial
    assert caplog.messages == [f"{path} was damaged; it is written anew from the results files"]
    inode = path.stat().st_ino
    run(tmp_path, range(COUNT))
    assert (path.stat().st_ino, len(caplog.messages)) == (inode, 1)


@pytest.mark.parametrize("name", FORMATS)
def test_index_that_lacks_lines_is_not_read_as_if_it_were_whole(tmp_path, name):
    keys = [key_of(index) for index in range(COUNT)]
    with ResultFolder(tmp_path, shard_items=4, facts={}, format=name) as results:
        for index, key in enumerate(keys):
            results.add(index, key, {}) if index != 1 else results.fail(index, key, "bad")
        results.finish(COUNT)
    assert len(Results(tmp_path)) == COUNT - 1
    path = tmp_path / "index.jsonl"
    whole = path.read_bytes()
    for content in (b"", cut_at_a_line(whole)):
        path.write_bytes(content)
        lines = content.count(b"\n")
        with pytest.raises(shmload.ResultsCorrupt, match=f"it has {lines} lines for {COUNT} items"):
            Results(tmp_path)
