"""Results are read back unchanged, by key or position, also in torch's DataLoader."""

import concurrent.futures
import os
import pickle
from pathlib import Path

import pytest
import torch
from storing import COUNT, arrays_of, key_of, run
from torch.utils.data import DataLoader

import shmload
from shmload.integrations.results import Array, ResultFolder, Results


@pytest.fixture
def folder(tmp_path):
    run(tmp_path / "results", range(COUNT))
    return tmp_path / "results"


def is_what_was_given(tensors, index):
    wanted = arrays_of(index)
    return tensors.keys() == wanted.keys() and all(
        bytes(tensor.view(torch.uint8).numpy()) == bytes(wanted[name].content)
        and tuple(tensor.shape) == wanted[name].shape
        for name, tensor in tensors.items()
    )


def test_each_result_is_found_by_key_and_by_place(folder):
    results = Results(folder)
    assert len(results) == COUNT
    assert list(results) == list(results.keys()) == [key_of(index) for index in range(COUNT)]
    for index in range(COUNT):
        assert key_of(index) in results
        assert is_what_was_given(results[key_of(index)], index)
        assert is_what_was_given(results[index], index)
    for index, (key, tensors) in enumerate(results.items()):
        assert key == key_of(index)
        assert is_what_was_given(tensors, index)
    assert results[0]["latent"].dtype is torch.bfloat16
    assert results.read(0)["latent"][:2] == ("BF16", arrays_of(0)["latent"].shape)


def test_keys_with_the_same_digest_are_told_apart(folder, monkeypatch):
    monkeypatch.setattr("shmload._results.reading.digest_key", lambda key: 1)
    results = Results(folder)
    for index in range(COUNT):
        assert is_what_was_given(results[key_of(index)], index)
    assert "nothing" not in results


def test_what_is_not_there_is_a_key_or_index_error(folder):
    results = Results(folder)
    for key in ("nothing", "\ud800", ""):
        assert key not in results
        with pytest.raises(KeyError):
            results[key]
    assert 0 not in results
    with pytest.raises(IndexError, match=f"no place {COUNT}; .* has {COUNT} results"):
        results[COUNT]
    assert is_what_was_given(results[-1], COUNT - 1)
    assert is_what_was_given(results[torch.tensor(1)], 1)
    for other in (Path("a.png"), 1.5, [0, 1]):
        with pytest.raises(TypeError, match="give a key, which is text, or a place"):
            results[other]


def test_file_in_the_place_of_the_folder_is_said(folder):
    with pytest.raises(shmload.ArgumentError, match=r"index\.jsonl is a file; give the folder"):
        Results(folder / "index.jsonl")


def test_tensors_have_memory_of_their_own(folder):
    results = Results(folder)
    before = results[1]["latent"].clone()
    changed = results[1]["latent"]
    changed.zero_()
    assert changed.untyped_storage().nbytes() == changed.nbytes
    assert torch.equal(results[1]["latent"], before)


def test_no_descriptor_stays_open(folder):
    before = len(os.listdir("/proc/self/fd"))
    results = Results(folder)
    tensors = [results[index] for index in range(COUNT)]
    assert len(tensors) == COUNT
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the index's mapping


def test_failed_items_are_left_out_and_listed(tmp_path):
    run(tmp_path, range(COUNT), failing={0, 5})
    results = Results(tmp_path)
    assert len(results) == COUNT - 2
    assert results.errors == {key_of(0): "ValueError: 0", key_of(5): "ValueError: 5"}
    assert key_of(5) not in results
    assert is_what_was_given(results[0], 1)
    assert is_what_was_given(results[7], 9)


@pytest.mark.parametrize("workers", [0, 2])
def test_results_are_a_data_set_for_the_data_loader(tmp_path, workers):
    with ResultFolder(tmp_path, shard_items=3, facts={}) as stored:
        for index in range(8):
            latent = torch.full((2, 2), float(index))
            stored.add(index, str(index), {"latent": Array("F32", (2, 2), latent.numpy())})
        stored.finish(8)
    loader = DataLoader(
        Results(tmp_path),
        batch_size=4,
        num_workers=workers,
        multiprocessing_context=(workers and "fork") or None,
    )
    batches = [batch["latent"][:, 0, 0].tolist() for batch in loader]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_pickled_results_open_the_folder_again(folder):
    results = pickle.loads(pickle.dumps(Results(folder)))
    assert is_what_was_given(results[4], 4)


def test_threads_share_results(folder):
    results = Results(folder)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = pool.map(
            lambda index: is_what_was_given(results[index % COUNT], index % COUNT), range(200)
        )
        assert all(found)


def test_unfinished_folder_is_an_error(tmp_path):
    with pytest.raises(shmload.ResultsUnfinished, match="run the job to its end"):
        Results(tmp_path)
    with ResultFolder(tmp_path, facts={}) as stored:
        stored.add(0, "a", {})
        with pytest.raises(shmload.ResultsUnfinished):
            Results(tmp_path)
        stored.finish(1)
        assert Results(tmp_path)["a"] == {}
        assert stored.is_done(0, "a")
        stored.add(1, "b", {})
        with pytest.raises(shmload.ResultsUnfinished):
            Results(tmp_path)


def test_no_results_can_be_opened(tmp_path):
    run(tmp_path, [])
    results = Results(tmp_path)
    assert (len(results), list(results), "a" in results) == (0, [], False)


def test_folder_that_changes_while_it_is_read_is_an_error(tmp_path):
    run(tmp_path, range(COUNT), failing={2})
    results = Results(tmp_path)
    assert is_what_was_given(results[0], 0)
    run(tmp_path, range(COUNT))
    with pytest.raises(shmload.ResultsChanged, match="open it again"):
        results[0]
    (tmp_path / "index.jsonl").unlink()
    with pytest.raises(shmload.ResultsChanged):
        results[0]
    assert is_what_was_given(Results(run_again(tmp_path))[2], 2)


def run_again(folder):
    run(folder, range(COUNT))
    return folder


def test_shard_that_is_cut_or_gone_is_an_error(folder):
    results = Results(folder)
    path = folder / "shard-00000.safetensors"
    os.truncate(path, 4096)
    with pytest.raises(shmload.ResultsCorrupt, match=r"shard-00000\.safetensors is damaged"):
        results[0]
    path.unlink()
    with pytest.raises(
        shmload.ResultsInaccessible, match=r"No such file.*; run the job again, which"
    ):
        results[0]


@pytest.mark.parametrize("name", ["index.jsonl", "shard-00000.safetensors"])
def test_pipe_in_place_of_a_file_is_not_waited_for(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(shmload.ResultsInaccessible, match="it is not a regular file"):
        Results(folder)[0]


def test_folder_that_does_not_exist_is_said_so(tmp_path):
    with pytest.raises(shmload.ResultsUnfinished, match="nix does not exist; check its path"):
        Results(tmp_path / "nix")


def test_failed_item_is_a_key_error_with_the_reason(tmp_path):
    run(tmp_path, range(COUNT), failing={5})
    results = Results(tmp_path)
    with pytest.raises(KeyError, match="failed: ValueError: 5"):
        results[key_of(5)]


def test_slice_gives_the_tensors_of_its_items(folder):
    results = Results(folder)
    found = results[1:9:4]
    assert len(found) == 2
    assert all(is_what_was_given(found[place], 1 + 4 * place) for place in range(2))
    assert results[COUNT:] == []


def test_results_say_what_they_are(tmp_path):
    run(tmp_path, range(COUNT), failing={5})
    assert repr(Results(tmp_path)) == f"Results({str(tmp_path)!r}): 9 items, 1 failed"


@pytest.mark.parametrize("cut", [1, 30])
def test_damaged_index_is_an_error(folder, cut):
    path = folder / "index.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(shmload.ResultsCorrupt, match=r"index\.jsonl is damaged"):
        Results(folder)


def test_dtype_that_torch_lacks_is_an_error_and_can_be_read_as_bytes(tmp_path):
    with ResultFolder(tmp_path, facts={}) as stored:
        stored.add(0, "a", {"x": Array("F6_E2M3", (4,), b"123")})
        stored.finish(1)
    results = Results(tmp_path)
    with pytest.raises(shmload.UnknownDtype, match="F6_E2M3"):
        results[0]
    assert results.read(0)["x"] == ("F6_E2M3", (4,), b"123")
