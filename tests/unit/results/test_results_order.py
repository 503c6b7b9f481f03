"""Items that were added or removed leave the others' numbers as they were."""

import pytest
from storing import FACTS, content_of

import shmload
from shmload._results.names import FORMATS
from shmload.integrations.results import ResultFolder, Results, continued_order


def store(folder, keys, *, done=None, format="safetensors"):
    """Store the items in this order, or those at the numbers in `done`; finish if all are done."""
    with ResultFolder(folder, shard_items=3, facts=FACTS, format=format) as results:
        for index, key in enumerate(keys):
            if (done is None or index in done) and not results.is_settled(index, key):
                results.add(index, key, {}) if key != "bad" else results.fail(index, key, "x")
        if done is None:
            results.finish(len(keys))


def test_new_folder_takes_the_order_that_is_given(tmp_path):
    assert continued_order(tmp_path / "none", ["b", "a"]) == ["b", "a"]
    assert continued_order(tmp_path, ["b", "a"]) == ["b", "a"]


@pytest.mark.parametrize("format", FORMATS)
def test_new_items_come_behind_those_that_were_there(tmp_path, format):
    store(tmp_path, ["a", "bad", "d", "e"], format=format)
    order = continued_order(tmp_path, ["0", "a", "bad", "c", "d", "e"])
    assert order == ["a", "bad", "d", "e", "0", "c"]
    store(tmp_path, order, format=format)
    assert list(Results(tmp_path)) == ["a", "d", "e", "0", "c"]
    assert continued_order(tmp_path, sorted(order)) == order


def test_items_that_are_gone_keep_their_numbers(tmp_path):
    store(tmp_path, ["a", "b", "c"])
    assert continued_order(tmp_path, ["a", "c", "d"]) == ["a", "b", "c", "d"]


def test_run_that_was_killed_goes_on_in_its_own_order(tmp_path):
    before = ["a", "c", "d", "e", "f", "g", "h"]
    store(tmp_path, before, done=[0, 1, 2, 4, 6])
    content = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert continued_order(tmp_path, before) == before
    order = continued_order(tmp_path, [*before[:1], "b", *before[1:]])
    assert order == ["a", "c", "d", "b", "f", "e", "h", "g"]
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == content
    store(tmp_path, order)
    assert continued_order(tmp_path, sorted(order)) == order


def test_number_that_no_item_is_left_for_is_an_error(tmp_path):
    store(tmp_path, ["a", "b", "c"], done=[0, 2])
    with pytest.raises(shmload.ResultsMismatch, match="item 1 has no result and is not there now"):
        continued_order(tmp_path, ["a", "c"])


def begin(folder, keys, *, done):
    """Begin these items as a job does, store some of them, and be killed."""
    with ResultFolder(folder, shard_items=3, facts=FACTS) as results:
        for index, key in enumerate(keys):
            results.is_settled(index, key)
        for index in done:
            results.add(index, keys[index], {})


def test_item_that_a_killed_run_began_may_be_gone(tmp_path):
    begin(tmp_path, ["a", "b", "c", "d", "e"], done=[2, 4, 0])
    order = continued_order(tmp_path, ["a", "c", "e"])
    assert order == ["a", "b", "c", "d", "e"]
    with ResultFolder(tmp_path, shard_items=3, facts=FACTS) as results:
        assert [results.is_settled(*item) for item in enumerate(order)] == [True, False] * 2 + [
            True
        ]
        results.fail(1, "b", "gone")
        results.fail(3, "d", "gone")
        assert results.finish(5).failed == 2
    assert Results(tmp_path).errors == {"b": "gone", "d": "gone"}
    assert continued_order(tmp_path, ["a"]) == order


def test_begun_items_keep_their_numbers_before_new_ones_take_them(tmp_path):
    begin(tmp_path, ["a", "b", "c", "d", "e", "f"], done=[4])
    assert continued_order(tmp_path, ["0", "a", "c", "d", "e", "f"]) == [
        "a",
        "0",
        "c",
        "d",
        "e",
        "f",
    ]
    assert continued_order(tmp_path, ["a", "e", "g"]) == ["a", "g", "c", "d", "e"]


def test_notes_of_begun_items_change_no_byte_of_a_finished_folder(tmp_path):
    keys = ["a", "b", "c", "d"]
    store(tmp_path / "serial", keys)
    begin(tmp_path / "out", keys, done=[1, 3])
    store(tmp_path / "out", keys)
    assert content_of(tmp_path / "out") == content_of(tmp_path / "serial")


def test_damaged_shard_is_an_error(tmp_path):
    store(tmp_path, ["a", "b", "c"])
    (tmp_path / "shard-00000.safetensors").write_bytes(b"")
    with pytest.raises(shmload.ResultsCorrupt, match="shard-00000"):
        continued_order(tmp_path, ["a"])
