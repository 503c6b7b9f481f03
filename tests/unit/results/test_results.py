"""A results folder has the same bytes after every kill and restart, and any tool reads it."""

import contextlib
import json
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from storing import (
    COUNT,
    FACTS,
    SHARD_ITEMS,
    Killed,
    Mortality,
    arrays_of,
    content_of,
    done_in,
    key_of,
    run,
    unfinished,
)

from shmload._results.shard import Shard
from shmload.integrations.results import Array, ResultFolder

# What is written ----------------------------------------------------------------------------------


def test_safetensors_reads_each_shard(tmp_path):
    run(tmp_path, range(COUNT))
    found = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 no mapping
    wanted = {
        f"{key_of(index)}/{name}": array
        for index in range(COUNT)
        for name, array in arrays_of(index).items()
    }
    assert found.keys() == wanted.keys()
    for name, (dtype, shape, content) in wanted.items():
        assert found[name].dtype is {"BF16": torch.bfloat16, "U8": torch.uint8}[dtype]
        assert tuple(found[name].shape) == shape
        assert bytes(found[name].view(torch.uint8).numpy()) == bytes(content)


def test_shards_divide_the_items_in_their_order(serial):
    shards = sorted(name for name in serial if name.endswith(".safetensors"))
    assert shards == [f"shard-0000{number}.safetensors" for number in range(3)]
    for number, name in enumerate(shards):
        length = int.from_bytes(serial[name][:8], "little")
        assert (8 + length) % 4096 == 0
        header = json.loads(serial[name][8 : 8 + length])
        metadata = header.pop("__metadata__")
        first = SHARD_ITEMS * number
        keys = [key_of(index) for index in range(first, min(COUNT, first + SHARD_ITEMS))]
        assert metadata == {
            "shmload.results": "1",
            "shmload.first": str(first),
            "shmload.keys": json.dumps(keys, separators=(",", ":"), ensure_ascii=False),
            "shmload.facts": json.dumps(dict(sorted(FACTS.items())), separators=(",", ":")),
        }
        latents = [name for name in header if name.endswith("/latent")]
        assert latents == [f"{key}/latent" for key in keys if f"{key}/latent" in header]


def test_index_says_where_each_array_is(serial):
    lines = [json.loads(line) for line in serial["index.jsonl"].splitlines()]
    assert [line["key"] for line in lines] == [key_of(index) for index in range(COUNT)]
    for index, line in enumerate(lines):
        wanted = arrays_of(index)
        assert line["shard"] == f"shard-0000{index // SHARD_ITEMS}.safetensors"
        assert line["arrays"].keys() == wanted.keys()
        for name, place in line["arrays"].items():
            dtype, shape, content = wanted[name]
            content = bytes(content)
            assert (place["dtype"], tuple(place["shape"])) == (dtype, shape)
            offset = place["offset"]
            assert serial[line["shard"]][offset : offset + len(content)] == content


def test_large_and_aligned_arrays_keep_the_item_order(tmp_path):
    with ResultFolder(tmp_path, facts={}) as results:
        for index in reversed(range(3)):
            content = bytes([index]) * (1 << 20)
            results.add(index, f"{index}", {"latent": Array("F32", (1 << 18,), content)})
        results.finish(3)
    data = (tmp_path / "shard-00000.safetensors").read_bytes()
    assert data[-3 << 20 :] == b"".join(bytes([index]) * (1 << 20) for index in range(3))


def test_each_tensor_is_aligned(serial):
    for name in filter(lambda name: name.endswith(".safetensors"), serial):
        length = int.from_bytes(serial[name][:8], "little")
        header = json.loads(serial[name][8 : 8 + length])
        del header["__metadata__"]
        assert any(key.endswith("/odd") for key in header)
        for tensor in header.values():
            if tensor["dtype"] == "BF16":
                assert tensor["data_offsets"][0] % 64 == 0


def test_array_order_and_buffer_kind_make_no_difference(tmp_path):
    content = os.urandom(32)
    a, b = Array("F32", (2, 4), content), Array("F32", (2, 4), np.frombuffer(content, np.float32))
    for name, arrays in {"one": {"x": a, "y": b}, "two": {"y": a, "x": b}}.items():
        with ResultFolder(tmp_path / name, facts={}) as results:
            results.add(0, "key", arrays)
            results.finish(1)
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_scalars_and_empty_arrays_are_kept(tmp_path, shape):
    tensor = torch.ones(shape)
    with ResultFolder(tmp_path, facts={}) as results:
        results.add(0, "key", {"x": Array("F32", shape, tensor.numpy())})
        results.finish(1)
    with safetensors.safe_open(tmp_path / "shard-00000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("key/x"), tensor)


def test_half_byte_elements_are_kept(tmp_path):
    with ResultFolder(tmp_path, facts={}) as results:
        results.add(0, "key", {"x": Array("F4", (3, 4), b"123456")})
        results.finish(1)
    (found,) = safetensors.deserialize((tmp_path / "shard-00000.safetensors").read_bytes())
    assert (found[1]["shape"], bytes(found[1]["data"])) == ([3, 4], b"123456")


def test_no_item_gives_an_empty_index(tmp_path):
    report = run(tmp_path, [])
    assert (report.items, report.shards) == (0, 0)
    assert content_of(tmp_path)["index.jsonl"] == b""


# What becomes of a job ----------------------------------------------------------------------------


def interrupted(folder, orders, stops):
    """Run a job that is killed at each of `stops`, then once to its end."""
    stored = set()
    for order, (at, part, failing) in zip(orders, stops, strict=False):
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed):
            Mortality(patch, at, part)
            run(folder, order, failing=failing, stored=stored)
    run(folder, orders[-1], stored=stored)


_ORDERS = st.lists(st.permutations(range(COUNT)), min_size=4, max_size=4)
_STOPS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 400), st.sets(st.integers(0, COUNT - 1))),
    max_size=3,
)


@pytest.mark.slow
@settings(max_examples=150)
@given(_ORDERS, _STOPS)
def test_killed_and_failed_and_in_any_order_gives_the_same_bytes(serial, orders, stops):
    with tempfile.TemporaryDirectory() as folder:
        interrupted(Path(folder) / "results", orders, stops)
        assert content_of(Path(folder) / "results") == serial


def is_killed(job, *args, **kwargs):
    try:
        job(*args, **kwargs)
    except Killed:
        return True
    return False


def test_journal_cut_at_each_byte_keeps_what_stands_before(tmp_path, serial):
    path = unfinished(tmp_path)
    whole = path.read_bytes()
    kept = []
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        kept.append(len(done_in(tmp_path)))
        assert path.stat().st_size <= length
    assert kept == sorted(kept)
    assert set(kept) == {0, 1, 2}
    for length in (0, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        run(tmp_path, range(COUNT))
        assert content_of(tmp_path) == serial
        for name in serial:
            (tmp_path / name).unlink()
        unfinished(tmp_path)


def test_older_journal_beside_a_newer_shard_adds_what_is_missing(tmp_path, serial):
    run(tmp_path / "newer", range(3))
    (tmp_path / "newer" / "index.jsonl").unlink()
    with ResultFolder(tmp_path / "older", shard_items=SHARD_ITEMS, facts=FACTS) as results:
        results.fail(2, key_of(2), "ValueError")
        results.add(3, key_of(3), arrays_of(3))
    name = "shard-00000.journal"
    (tmp_path / "older" / name).rename(tmp_path / "newer" / name)
    assert done_in(tmp_path / "newer") == [0, 1, 2, 3]
    assert run(tmp_path / "newer", range(COUNT)).failed == 0
    assert content_of(tmp_path / "newer") == serial


def test_journal_of_a_finished_shard_goes_and_the_shard_is_left_alone(tmp_path, serial):
    path = unfinished(tmp_path)
    journal = path.read_bytes()
    run(tmp_path, range(COUNT))
    shard = path.with_suffix(".safetensors")
    before = shard.stat().st_ino
    path.write_bytes(journal)
    assert done_in(tmp_path) == list(range(COUNT))
    assert not path.exists()
    assert shard.stat().st_ino == before
    assert content_of(tmp_path) == serial


def test_stored_item_is_not_computed_again(tmp_path):
    unfinished(tmp_path)
    assert done_in(tmp_path) == [0, 1, 2]
    assert run(tmp_path, range(COUNT)).added == COUNT - 3
    assert done_in(tmp_path) == list(range(COUNT))
    assert run(tmp_path, range(COUNT)).added == 0


def test_finished_folder_is_left_alone(tmp_path):
    run(tmp_path, range(COUNT))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    report = run(tmp_path, range(COUNT))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert (report.items, report.failed, report.shards) == (COUNT, 0, 3)
    assert report.nbytes == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))


def test_resuming_reads_no_data_of_a_finished_shard(tmp_path):
    run(tmp_path, range(COUNT))
    path = tmp_path / "shard-00000.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    size = path.stat().st_size
    os.truncate(path, 8 + length)
    os.truncate(path, size)  # zeros instead of the data
    assert done_in(tmp_path) == list(range(COUNT))


def test_scattered_items_keep_few_files_open(tmp_path):
    order = random.Random(5).sample(range(300), 300)
    most = 0
    with ResultFolder(tmp_path, shard_items=3, facts={}) as results:
        for index in order:
            results.add(index, str(index), {"x": Array("U8", (1,), b"x")})
            most = max(most, len(os.listdir("/proc/self/fd")))
        results.finish(300)
    assert most - len(os.listdir("/proc/self/fd")) < 25
    assert len(list(tmp_path.glob("*.safetensors"))) == 100


# Failures -----------------------------------------------------------------------------------------


def test_failed_item_is_in_the_index_and_tried_again(tmp_path, serial):
    report = run(tmp_path, range(COUNT), failing={1, 9})
    assert (report.failed, report.added) == (2, COUNT - 2)
    lines = [json.loads(line) for line in (tmp_path / "index.jsonl").read_text().splitlines()]
    assert lines[1] == {"key": key_of(1), "error": "ValueError: 1"}
    assert lines[9] == {"key": key_of(9), "error": "ValueError: 9"}
    assert done_in(tmp_path) == [index for index in range(COUNT) if index not in (1, 9)]
    assert run(tmp_path, range(COUNT), failing={9}).failed == 1
    assert not list(tmp_path.glob("*.journal"))
    assert run(tmp_path, range(COUNT)).added == 1
    assert content_of(tmp_path) == serial


def test_item_that_failed_stays_so_until_it_is_to_be_tried_again(tmp_path, serial):
    run(tmp_path, range(COUNT), failing={1, 9})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    report = run(tmp_path, range(COUNT), retry_failed=False)
    assert (report.failed, report.failed_before, report.added) == (2, 2, 0)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    report = run(tmp_path, range(COUNT), failing={9})
    assert (report.failed, report.failed_before, report.added) == (1, 0, 1)
    assert run(tmp_path, range(COUNT)).failed == 0
    assert content_of(tmp_path) == serial


def test_killed_at_each_step_items_that_failed_stay_so(tmp_path):
    run(tmp_path / "whole", range(COUNT), failing={2, 5, 9})
    wanted = content_of(tmp_path / "whole")
    for at in range(1000):
        folder = tmp_path / str(at)
        with pytest.MonkeyPatch.context() as patch:
            Mortality(patch, at, part=30)
            stored = set()
            if not is_killed(run, folder, range(COUNT), failing={2, 5, 9}, stored=stored):
                break
        report = run(folder, range(COUNT), failing={2, 5, 9}, stored=stored, retry_failed=False)
        assert report.failed == 3
        assert content_of(folder) == wanted
    assert at > 35


@pytest.mark.parametrize("retry_failed", [False, True])
def test_result_of_an_item_that_had_failed_is_not_lost_in_a_kill(tmp_path, retry_failed):
    run(tmp_path, range(COUNT), failing={1, 2})
    arguments = {"shard_items": SHARD_ITEMS, "facts": FACTS, "retry_failed": retry_failed}
    with ResultFolder(tmp_path, **arguments) as results, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shard, "commit", lambda *_: None)
        results.add(1, key_of(1), arrays_of(1))
    with ResultFolder(tmp_path, **arguments) as results:
        assert results.is_done(1, key_of(1))
        assert results.is_settled(2, key_of(2)) is not retry_failed
    assert run(tmp_path, range(COUNT), stored={1}, retry_failed=False).failed_before == 1


def test_item_that_failed_can_be_added_in_the_same_run(tmp_path, serial):
    with ResultFolder(tmp_path, shard_items=SHARD_ITEMS, facts=FACTS) as results:
        for index in range(COUNT):
            results.fail(index, key_of(index), "not yet")
        for index in range(COUNT):
            assert not results.is_done(index, key_of(index))
            results.add(index, key_of(index), arrays_of(index))
        results.finish(COUNT)
    assert content_of(tmp_path) == serial


def test_only_failures_make_a_folder_too(tmp_path, serial):
    assert run(tmp_path, range(COUNT), failing=set(range(COUNT))).failed == COUNT
    with safetensors.safe_open(tmp_path / "shard-00000.safetensors", "pt") as file:
        assert not list(file.keys())
    run(tmp_path, range(COUNT))
    assert content_of(tmp_path) == serial


def test_error_of_any_text_is_stored(tmp_path):
    error = "\ud800 \0 \N{COLLISION SYMBOL}\n" * 2000
    with ResultFolder(tmp_path, facts={}) as results:
        results.fail(0, "key", error)
        results.finish(1)
    (line,) = (tmp_path / "index.jsonl").read_text().splitlines()
    stored = json.loads(line)["error"]
    assert len(stored) == 1000
    assert stored.endswith("\\ud800 \0 \N{COLLISION SYMBOL}\n")
