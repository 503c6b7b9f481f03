"""A results folder equals a serial run's, whatever was killed, raised or tried again."""

import json
import os
import signal

import numpy as np
import pytest
import torch

import shmload
from shmload._jobs.runner import limited_threads, seed_generators
from shmload.integrations import dataprep
from shmload.integrations.results import Results

COUNT = 12
OPTIONS = {"components": ["vae"], "torch_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def source(saved):
    return saved("stable-diffusion")


@pytest.fixture(scope="module")
def job(source):
    with dataprep.Job(source, **OPTIONS, procs=2) as made:
        list(made.map(lambda pipe, item: None, range(8)))
        yield made


@pytest.fixture(autouse=True)
def _no_leaks():
    """Turn the leak check off, as in test_dataprep.py."""


@pytest.fixture
def calls(tmp_path):
    """A folder in which each call of the function leaves a file."""
    folder = tmp_path / "calls"
    folder.mkdir()
    return folder


def encode(pipe, item):
    pixels = torch.rand(1, 3, 16, 16, dtype=pipe.vae.dtype)
    latents = pipe.vae.encode(pixels).latent_dist.sample()[0]
    return {"latents": latents, "place": np.array([item], "int64")}


def noting(calls):
    """Return a function that records the item of each call."""

    def note_and_encode(pipe, item):
        number = len([name for name in os.listdir(calls) if name.startswith(f"{item}-")])
        (calls / f"{item}-{number}").touch()
        return encode(pipe, item)

    return note_and_encode


def contents(folder):
    return {
        path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"
    }


def serial(source, folder, function=encode, items=range(COUNT), **options):
    try:
        dataprep.write(function, items, folder, source=source, **OPTIONS, procs=0, **options)
    finally:
        shmload.Handle.of(source, **OPTIONS).close()
    return contents(folder)


def test_folder_has_the_bytes_of_a_serial_run_and_of_the_library(job, source, tmp_path):
    report = job.write(encode, range(COUNT), tmp_path / "out", shard_items=5)
    assert (report.items, report.added, report.failed, report.shards) == (COUNT, COUNT, 0, 3)
    assert contents(tmp_path / "out") == serial(source, tmp_path / "serial", shard_items=5)
    results = Results(tmp_path / "out")
    pipe = shmload.load_pipeline(source, torch_dtype="bfloat16", components=["vae"])
    for index, key in enumerate(results):
        seed_generators(0, index)
        with torch.no_grad(), limited_threads(1):
            wanted = encode(pipe, index)
        assert key == f"{index:08}"
        assert torch.equal(results[key]["latents"], wanted["latents"])
        assert results[key]["place"].tolist() == [index]


def test_second_run_does_nothing(job, calls, tmp_path):
    job.write(noting(calls), range(COUNT), tmp_path / "out")
    before = contents(tmp_path / "out")
    report = job.write(noting(calls), range(COUNT), tmp_path / "out")
    assert report.added == 0
    assert len(os.listdir(calls)) == COUNT
    assert contents(tmp_path / "out") == before


def test_items_have_the_names_that_they_are_given(job, tmp_path):
    job.write(encode, range(3), tmp_path / "out", key=lambda item: f"cats/{item}.png")
    assert list(Results(tmp_path / "out")) == ["cats/0.png", "cats/1.png", "cats/2.png"]
    with pytest.raises(shmload.DuplicateKey):
        job.write(encode, range(3), tmp_path / "other", key=lambda item: "the same")


def test_run_that_an_error_ended_goes_on(job, source, calls, tmp_path):
    note, mark = noting(calls), tmp_path / "mark"

    def fail_once(pipe, item):
        if item == 7 and not mark.exists():
            mark.touch()
            raise LookupError("not there")
        return note(pipe, item)

    with pytest.raises(shmload.ItemFailed, match="item 7, 7: LookupError"):
        job.write(fail_once, range(COUNT), tmp_path / "out", shard_items=5)
    job.write(fail_once, range(COUNT), tmp_path / "out", shard_items=5)
    assert contents(tmp_path / "out") == serial(source, tmp_path / "serial", shard_items=5)


def test_items_that_failed_are_in_the_index_and_tried_again(job, source, tmp_path):
    mark = tmp_path / "mark"

    def fail_without_mark(pipe, item):
        if item == 4 and not mark.exists():
            raise LookupError("not there")
        if item == 6 and not mark.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(pipe, item)

    report = job.write(fail_without_mark, range(COUNT), tmp_path / "out", errors="pass")
    assert (report.items, report.failed) == (COUNT, 2)
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "index.jsonl").read_text().splitlines()
    ]
    assert lines[4]["error"] == "LookupError: not there"
    assert "3 processes ended at it" in lines[6]["error"]
    mark.touch()
    report = job.write(fail_without_mark, range(COUNT), tmp_path / "out", retry_failed=True)
    assert (report.added, report.failed) == (2, 0)
    assert contents(tmp_path / "out") == serial(source, tmp_path / "serial")


def test_what_results_depend_on_must_be_the_same(job, source, tmp_path):
    job.write(encode, range(3), tmp_path / "out", facts={"size": "16"})
    with pytest.raises(shmload.ResultsMismatch, match="size"):
        job.write(encode, range(3), tmp_path / "out", facts={"size": "32"})
    for change in ({"seed": 1}, {"threads": 2}, {"torch_dtype": "float16"}):
        with (
            dataprep.Job(source, **(OPTIONS | {"procs": 0} | change)) as other,
            pytest.raises(shmload.ResultsMismatch, match=min(change)),
        ):
            other.write(encode, range(3), tmp_path / "out", facts={"size": "16"})


@pytest.mark.parametrize("facts", [{"size": 512}, {"seed": "1"}, {"pipeline": "mine"}])
def test_fact_that_is_no_text_or_known_already_is_refused(job, tmp_path, facts):
    with pytest.raises(shmload.ArgumentError, match=min(facts)):
        job.write(encode, range(3), tmp_path / "out", facts=facts)
    assert job.write(encode, range(3), tmp_path / "out").added == 3


def test_key_that_is_no_text_is_refused(job, tmp_path):
    with pytest.raises(shmload.ArgumentError, match="the key 0 is a int"):
        job.write(encode, range(3), tmp_path / "out", key=lambda item: item)


def test_result_that_is_no_dict_of_arrays_is_an_error_of_its_item(job, tmp_path):
    with pytest.raises(shmload.ItemFailed, match="returned a Tensor"):
        job.write(lambda pipe, item: torch.zeros(1), [0], tmp_path / "out")
    with pytest.raises(shmload.ItemFailed, match="'text' is a str"):
        job.write(lambda pipe, item: {"text": "a"}, [0], tmp_path / "out")


def test_dtypes_and_empty_results_arrive_as_they_are(job, tmp_path):
    def make(pipe, item):
        if item == 0:
            return {}
        return {
            "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
            "empty": torch.zeros(0, 4),
            "scalar": torch.tensor(3.5),
            "flags": np.array([True, False]),
            "big": np.arange(3, dtype=">i4"),
        }

    job.write(make, range(2), tmp_path / "out")
    results = Results(tmp_path / "out")
    assert results[0] == {}
    got = results[1]
    assert torch.equal(got["bf16"], torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T)
    assert got["empty"].shape == (0, 4)
    assert got["scalar"].item() == 3.5
    assert got["flags"].tolist() == [True, False]
    assert got["big"].tolist() == [0, 1, 2]
