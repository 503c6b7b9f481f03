"""A job computes every item once, in processes that share one pipeline, whichever of them ends."""

import contextlib
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from comparing import reference
from light_jobs import write_server
from mappings import copied_nbytes

import shmload
from shmload._jobs.runner import limited_threads, seed_generators
from shmload.integrations import dataprep

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def source(saved):
    return saved("stable-diffusion")


@pytest.fixture(autouse=True)
def _no_leaks():
    """Turn the leak check off: an error ends a map, and the job replaces the processes at work.

    test_dying_runners.py tests that nothing is left in the end.
    """


@pytest.fixture(scope="module")
def job(source):
    """A job of two processes, for tests that do not kill them."""
    with dataprep.Job(source, components=["vae"], torch_dtype="bfloat16", procs=2) as made:
        with tempfile.TemporaryDirectory() as folder:  # both processes run before the first test
            assert len(set(made.map(wait_for_the_other, [folder, folder]))) == 2
        yield made


def wait_for_the_other(pipe, folder):
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < 2:
        pass
    return os.getpid()


def encode(pipe, item):
    pixels = torch.rand(1, 3, 16, 16, dtype=pipe.vae.dtype)
    return item, pipe.vae.encode(pixels).latent_dist.sample()


def wanted(source, items):
    """The results by the library alone."""
    pipe = reference(str(source), torch.bfloat16, unet=None, text_encoder=None, safety_checker=None)
    for index, item in enumerate(items):
        seed_generators(0, index)
        with torch.no_grad(), limited_threads(1):
            yield encode(pipe, item)


def assert_same(got, reference):
    got, reference = list(got), list(reference)
    assert [item for item, _ in got] == [item for item, _ in reference]
    for (_, latents), (_, right) in zip(got, reference, strict=True):
        assert latents.dtype == right.dtype
        assert torch.equal(latents, right)


# Results ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.libraries
def test_results_are_those_of_a_loop_with_the_library(job, source):
    assert_same(job.map(encode, range(20)), wanted(source, range(20)))


def test_as_completed_gives_the_same_in_another_order(job, source):
    got = sorted(job.map(encode, range(20), as_completed=True), key=lambda pair: pair[0])
    assert_same(got, wanted(source, range(20)))


@pytest.mark.libraries
def test_without_processes_it_is_the_same(source):
    options = {"source": source, "components": ["vae"], "torch_dtype": "bfloat16", "procs": 0}
    assert_same(dataprep.map(encode, range(6), **options), wanted(source, range(6)))


def test_random_numbers_depend_on_the_item_alone(job):
    def draw(pipe, item):
        import random

        import numpy as np

        return random.random(), float(np.random.rand()), torch.rand(()).item()

    first = list(job.map(draw, range(12)))
    assert len(set(first)) == 12
    assert list(job.map(draw, range(12))) == first
    assert [found[2] for found in job.map(draw, range(12))] == [found[2] for found in first]


def test_function_may_be_a_lambda_and_refer_to_what_is_around_it(job):
    offset = 40
    assert list(job.map(lambda pipe, item: item + offset, [1, 2])) == [41, 42]


def test_no_items_are_no_results(job):
    assert list(job.map(encode, [])) == []


def test_large_items_and_results_pass_each_other(job):
    items = [torch.full((1 << 19,), float(number)) for number in range(12)]
    for number, got in enumerate(job.map(lambda pipe, item: item + 1, items)):
        assert got.shape == (1 << 19,)
        assert got.max() == got.min() == number + 1


@pytest.mark.libraries
def test_components_that_were_not_named_are_none(job, source):
    def look(pipe, item):
        return type(pipe).__name__, pipe.unet is None, pipe.tokenizer is None, str(pipe.vae.dtype)

    assert list(job.map(look, [0])) == [("StableDiffusionPipeline", True, False, "torch.bfloat16")]


# Errors -------------------------------------------------------------------------------------------


def fail_at_three(pipe, item):
    if item == 3:
        raise LookupError("three is not there")
    return item


def test_error_names_the_item_and_carries_cause_and_traceback(job):
    with pytest.raises(shmload.ItemFailed, match="item 3, 3: LookupError: three is") as caught:
        list(job.map(fail_at_three, range(8)))
    assert (caught.value.index, caught.value.item) == (3, 3)
    assert isinstance(caught.value.__cause__, LookupError)
    assert "in fail_at_three" in caught.value.__notes__[0]


def test_error_may_stand_in_the_results_place(job):
    got = list(job.map(fail_at_three, range(8), errors="pass"))
    assert got[:3] + got[4:] == [0, 1, 2, 4, 5, 6, 7]
    assert isinstance(got[3], shmload.ItemFailed)


@pytest.mark.libraries
@pytest.mark.parametrize("procs", [0, 2])
@pytest.mark.parametrize("use", [lambda pipe: pipe.text_encoder(1), lambda pipe: pipe.unet.dtype])
def test_error_of_a_component_that_was_not_named_says_so(job, source, procs, use):
    with (
        contextlib.nullcontext(job) if procs else dataprep.Job(source, components=["vae"], procs=0)
    ) as asked:
        with pytest.raises(shmload.ItemFailed, match=r"None in this .*text_encoder, unet;"):
            list(asked.map(lambda pipe, item: use(pipe), [0]))
        with pytest.raises(shmload.ItemFailed, match=r"'int' object has no attribute 'dtype'$"):
            list(asked.map(lambda pipe, item: item.dtype, [0]))


def test_error_that_cannot_cross_arrives_as_its_text(job):
    def fail(pipe, item):
        class Odd(Exception):
            def __reduce__(self):
                raise TypeError("not me")

        raise Odd("something odd")

    with pytest.raises(shmload.ItemFailed, match="Odd: something odd"):
        list(job.map(fail, [0]))


def test_error_of_any_text_arrives(job):
    def fail(pipe, item):
        raise ValueError("the name \udcff is no UTF-8")

    with pytest.raises(shmload.ItemFailed, match=r"the name \\udcff is") as caught:
        list(job.map(fail, [0]))
    assert "the name \\udcff is" in caught.value.__notes__[0]


@pytest.mark.parametrize("procs", [0, 2])
def test_error_that_cannot_say_what_it_is_is_that_items_error(job, source, procs):
    def fail(pipe, item):
        class Mute(Exception):
            def __str__(self):
                raise TypeError("no words")

        if item:
            raise Mute

    with (
        contextlib.nullcontext(job) if procs else dataprep.Job(source, components=["vae"], procs=0)
    ) as asked:
        got = list(asked.map(fail, [0, 1], errors="pass"))
    assert got[0] is None
    assert "Mute: <exception str() failed>" in str(got[1])


def test_result_that_cannot_cross_is_the_items_error(job):
    with pytest.raises(shmload.ItemFailed, match="cannot pickle"):
        list(job.map(lambda pipe, item: threading.Lock(), [0]))


def test_exit_in_the_function_is_an_error_of_the_item(job):
    with pytest.raises(shmload.ItemFailed, match="SystemExit: 3"):
        list(job.map(lambda pipe, item: exit(3), [0]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"procs": -1}, "procs is -1"),
        ({"threads": 0}, "threads is 0"),
        ({"item_timeout_s": 0}, "item_timeout_s is 0"),
        ({"devices": []}, "an empty list"),
        ({"devices": "meta"}, "nothing can be computed"),
        ({"devices": "nowhere at all"}, "is not a device"),
        ({"procs": 0, "devices": "xpu"}, "stay on the CPU"),
        ({"components": ["vea"]}, "no component 'vea'"),
        ({"components": "vae"}, "give a list of names"),
    ],
)
def test_wrong_argument_is_refused_at_once(source, arguments, message):
    with pytest.raises(shmload.ArgumentError, match=message):
        dataprep.Job(source, **arguments)


def test_text_in_the_place_of_items_is_refused(source, tmp_path):
    with dataprep.Job(source, procs=0) as job:
        with pytest.raises(shmload.ArgumentError, match="items is 'pictures'; give the items"):
            list(job.map(lambda pipe, item: item, "pictures"))
        with pytest.raises(shmload.ArgumentError, match="items is 'pictures'; give the items"):
            job.write(lambda pipe, item: {}, "pictures", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_handle_and_what_it_says_already_are_refused_together(source):
    handle = shmload.Handle.of(source)
    with pytest.raises(shmload.ArgumentError, match="the source is a Handle"):
        dataprep.Job(handle, torch_dtype="bf16")


def test_job_says_what_it_is(source):
    with dataprep.Job(source, components=["vae"], procs=3, start=False) as job:
        said = repr(job)
        assert str(source) in said
        assert said.endswith(": 3 processes on cpu")
    assert repr(job) == f"{said}, closed"


@pytest.mark.parametrize("devices", ["round-robin", ["cpu", "cuda:1"]])
def test_gpu_without_a_driver_is_refused_at_once(source, monkeypatch, devices):
    monkeypatch.setattr("shmload._runtimes.kinds.may_have_accelerators", lambda: False)
    monkeypatch.setattr("shmload._runtimes.kinds.may_have", lambda kind: False)
    with pytest.raises(
        shmload.ArgumentError, match=r"no driver of (such a device|an accelerator); install it"
    ):
        dataprep.Job(source, devices=devices)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices_that_are_not_there_are_an_error(source, monkeypatch):
    monkeypatch.setattr("shmload._runtimes.kinds.may_have_accelerators", lambda: True)
    with (
        dataprep.Job(source, components=["vae"], procs=1, devices="round-robin") as job,
        pytest.raises(shmload.ArgumentError, match="no accelerator"),
    ):
        next(job.map(encode, [0]))


@pytest.mark.libraries
def test_pipeline_that_cannot_be_loaded_is_its_own_error(copied):
    broken = copied("stable-diffusion")
    shard = broken / "vae" / "diffusion_pytorch_model.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with (
        dataprep.Job(broken, components=["vae"], torch_dtype="bf16", procs=1) as job,
        pytest.raises(shmload.ShardTruncated) as caught,
    ):
        next(job.map(encode, [0]))
    assert "in a process of the job" in caught.value.__notes__[0]


# One copy -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.libraries
def test_processes_have_no_weights_of_their_own(large_pipeline):
    def measure(pipe, item):
        tensors = list(pipe.unet.parameters())
        sum(tensor.float().sum() for tensor in tensors)  # reads every page
        return sum(tensor.nbytes for tensor in tensors), copied_nbytes(pipe)

    with dataprep.Job(large_pipeline, torch_dtype="bfloat16", procs=2) as job:
        for nbytes, copied in job.map(measure, range(4)):
            assert nbytes > 100_000
            assert copied == 0


SPAWNED = """
import multiprocessing, sys
from shmload.integrations import dataprep

def double(pipe, item):
    return helped(item)

def helped(item):
    return 2 * item

def run(source, python):
    sys.executable = python
    print(*dataprep.map(double, range(3), source=source, procs=1), flush=True)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=run, args=sys.argv[1:], daemon=True)
    process.start()
    process.join()
"""


def test_function_of_a_spawned_program_goes_by_value(pipeline, tmp_path, warm_python):
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    done = warm_python.run(program, pipeline, write_server(tmp_path / "server"))
    assert done.stdout == "0 2 4\n", done.stderr
