"""Every format of results files keeps the same promises, and its own library reads it.

The other modules test safetensors, the default.
"""

import importlib.util

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.torch
import torch
import webdataset
from storing import (
    COUNT,
    FACTS,
    SHARD_ITEMS,
    Killed,
    Mortality,
    arrays_of,
    content_of,
    key_of,
    run,
)

import shmload
from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES
from shmload._results.names import FORMATS
from shmload.integrations.results import Array, ResultFolder, Results

with_a_library = pytest.mark.parametrize("format", ["parquet", "webdataset"])


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture
def whole(tmp_path, format):
    """The content of a folder after an undisturbed run, by the files' names."""
    run(tmp_path / "whole", range(COUNT), format=format)
    return content_of(tmp_path / "whole")


def shards(folder, format):
    return sorted(folder.glob(f"shard-*{FORMATS[format].suffix}"))


def is_killed(folder, **arguments):
    try:
        run(folder, range(COUNT), **arguments)
    except Killed:
        return True
    return False


def check_files(folder, format):
    """Check that each file with a public name is a whole one, which a reader takes."""
    for path in shards(folder, format):
        with FORMATS[format].open(path) as file:
            for item in file.items():
                for place in (item.arrays or {}).values():
                    assert len(file.read(place)) == place.nbytes


# Killed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [set(), {2, 5, 9}])
def test_killed_at_each_step_it_gives_the_same_bytes_and_no_half_file(
    tmp_path, format, whole, failing
):
    for at in range(1000):
        folder = tmp_path / str(at)
        if failing:
            run(folder, range(COUNT), failing=failing, format=format)
        stored = set(range(COUNT)) - failing if failing else set()
        with pytest.MonkeyPatch.context() as patch:
            Mortality(patch, at, part=30)
            if not is_killed(folder, stored=stored, format=format):
                break
        check_files(folder, format)
        run(folder, range(COUNT), stored=stored, format=format)
        assert content_of(folder) == whole
    assert at > (15 if failing else 35)


def test_more_items_later_give_what_they_would_have_given_at_once(tmp_path, format, whole):
    run(tmp_path / "later", range(6), format=format)
    assert run(tmp_path / "later", range(COUNT), format=format).added == COUNT - 6
    assert content_of(tmp_path / "later") == whole


# Read ---------------------------------------------------------------------------------------------


def test_each_result_is_found_by_key_and_by_place(tmp_path, format):
    run(tmp_path, range(COUNT), failing={2}, format=format)
    results = Results(tmp_path)
    assert results.errors == {key_of(2): "ValueError: 2"}
    left = [index for index in range(COUNT) if index != 2]
    assert list(results) == [key_of(index) for index in left]
    for place, index in enumerate(left):
        for name, array in arrays_of(index).items():
            for found in (results.read(place), results.read(key_of(index))):
                assert found[name][:2] == array[:2]
                assert bytes(found[name].content) == bytes(array.content)
        assert results.read(place).keys() == arrays_of(index).keys()


def read_by_parquet(folder):
    for path in shards(folder, "parquet"):
        for row in pyarrow.parquet.read_table(path, use_threads=False).to_pylist():
            key = row.pop("key")
            yield key, {name: as_tensor(array) for name, array in row.items() if array}


def as_tensor(array):
    dtype, data = getattr(torch, array["dtype"]), bytearray(array["data"])
    if not data:
        return torch.empty(array["shape"], dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(array["shape"])


def read_by_webdataset(folder):
    paths = [str(path) for path in shards(folder, "webdataset")]
    load = webdataset.handle_extension("safetensors", safetensors.torch.load)
    for sample in webdataset.WebDataset(paths, shardshuffle=False).decode(load):
        yield sample["json"]["key"], sample["safetensors"]


READ = {"parquet": read_by_parquet, "webdataset": read_by_webdataset}


@pytest.mark.filterwarnings("ignore:unclosed file")  # webdataset leaves that to the collector
@with_a_library
def test_library_reads_every_dtype_exactly(tmp_path, format):
    random = np.random.default_rng(0)
    given = {}
    unknown = {"F4", "F8_E8M0"} if format == "webdataset" else {"F4"}  # to safetensors.torch.load
    for dtype in TORCH_NAMES:
        if dtype not in unknown:
            content = random.integers(0, 2, 3 * 4 * NBITS[dtype] // 8, np.uint8)
            content *= 1 if dtype == "BOOL" else random.integers(1, 255, content.shape, np.uint8)
            given[f"a.{dtype}"] = Array(dtype, (3, 4), content.tobytes())
    given |= {"scalar": Array("F32", (), b"abcd"), "none": Array("BF16", (0, 3), b"")}
    with ResultFolder(tmp_path, shard_items=2, facts=FACTS, format=format) as results:
        for index in range(5):
            results.add(index, key_of(index), given if index != 3 else {})
        results.finish(5)
    found = dict(READ[format](tmp_path))
    assert list(found) == [key_of(index) for index in range(5)]
    assert found.pop(key_of(3)) == {}
    for tensors in found.values():
        assert tensors.keys() == given.keys()
        for name, (dtype, shape, content) in given.items():
            assert tensors[name].dtype is getattr(torch, TORCH_NAMES[dtype])
            assert tuple(tensors[name].shape) == shape
            flat = tensors[name].reshape(-1)
            assert (flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"") == content


def test_large_items_are_found_in_their_part_of_the_file(tmp_path, format):
    with ResultFolder(tmp_path, shard_items=7, facts={}, format=format) as results:
        for index in range(7):
            content = bytes([index]) * (3 << 20)
            results.add(index, str(index), {"x": Array("U8", (3 << 20,), content), "y.x": ONE})
        results.finish(7)
    found = Results(tmp_path)
    for index in (6, 0, 3, 2):
        assert found.read(index)["x"].content == bytes([index]) * (3 << 20)
        assert found.read(index)["y.x"].content == b"1"


ONE = Array("U8", (1,), b"1")


# Refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["cut", "emptied", "rubbish", "another", "short"])
def test_damaged_file_is_an_error_until_it_is_removed(tmp_path, format, whole, harm):
    folder = tmp_path / "harmed"
    run(folder, range(COUNT), failing={9}, format=format)
    path = shards(folder, format)[1]
    content = path.read_bytes()
    path.write_bytes(
        {
            "cut": content[:-1],
            "emptied": b"",
            "rubbish": b"\5\0\0\0\0\0\0\0{}   " * 100,
            "another": shards(folder, format)[0].read_bytes(),
            "short": content[:1600],
        }[harm]
    )
    with pytest.raises(shmload.ResultsCorrupt, match=rf"{path.name} .* remove it"):
        run(folder, range(COUNT), format=format)
    path.unlink()
    run(folder, range(COUNT), format=format)
    assert content_of(folder) == whole


@with_a_library
def test_folder_keeps_its_format(tmp_path, format):
    run(tmp_path, range(COUNT), format=format)
    with pytest.raises(shmload.ResultsMismatch, match=f"the format is '{format}' there, and 'safe"):
        run(tmp_path, range(COUNT))
    with pytest.raises(shmload.ArgumentError, match=f"format is 'csv'; give .*{format}"):
        run(tmp_path, range(COUNT), format="csv")


@with_a_library
def test_library_that_is_missing_is_named_with_its_extra(tmp_path, format, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(shmload.ArgumentError, match=rf"pip install 'shmload\[{format}\]'"):
        run(tmp_path, range(COUNT), format=format)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["\ud800", "k" * 20_000_000])
def test_key_that_no_file_can_hold_is_refused(tmp_path, format, key):
    arguments = {"shard_items": SHARD_ITEMS, "facts": FACTS, "format": format}
    with ResultFolder(tmp_path, **arguments) as results:
        with pytest.raises(shmload.ArgumentError):
            results.add(0, key, {})
        results.add(0, "key", {})
        if format == "parquet":
            with pytest.raises(shmload.ArgumentError, match="an array 'key'"):
                results.add(1, "other", {"key": ONE})


@with_a_library
def test_array_that_is_too_large_is_refused(tmp_path, format, monkeypatch):
    module = f"shmload._results.{format}"
    limit = {"parquet": "_MAX_ARRAY_NBYTES", "webdataset": "_MAX_SAMPLE_NBYTES"}[format]
    monkeypatch.setattr(f"{module}.{limit}", 0)
    with (
        ResultFolder(tmp_path, facts=FACTS, format=format) as results,
        pytest.raises(shmload.ArgumentError, match="use another format"),
    ):
        results.add(0, "key", {"x": ONE})


def test_text_of_numpy_is_text(tmp_path, format):
    """Keys from a column of a table are often of a subclass of `str`, which msgspec refuses."""
    keys = np.array(["a.png", "b.png", "c.png"])
    for folder, texts in (("plain", [str(key) for key in keys]), ("numpy", list(keys))):
        facts = {type(texts[0])("size"): type(texts[0])("64")}
        with ResultFolder(tmp_path / folder, facts=facts, format=format) as results:
            assert not results.is_settled(0, texts[0])
            results.add(1, texts[1], {type(texts[0])("x"): ONE})
            results.fail(2, texts[2], "bad")
            results.add(0, texts[0], {type(texts[0])("x"): ONE})
            results.finish(3)
    assert content_of(tmp_path / "numpy") == content_of(tmp_path / "plain")
    assert Results(tmp_path / "numpy").read(keys[0])["x"].content == b"1"
