"""A job stores the right results, the same bytes each time, and computes nothing twice."""

import os
import sys

import cloudpickle
import numpy as np
import pytest
import torch
from comparing import reference
from light_jobs import notes
from safetensors.torch import load_file
from stored_jobs import COUNT, squares
from storing import content_of

import shmload
from shmload._jobs.runner import limited_threads, seed_generators
from shmload.integrations import dataprep
from shmload.integrations.results import Results

# Pickle this module's functions by value, so that a job's processes do not import all of the above.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

# With a pipeline ----------------------------------------------------------------------------------


def encode(pipe, item):
    """Return arrays of all kinds, and none for each fourth item."""
    if item % 4 == 3:
        return {}
    pixels = torch.rand(1, 3, 16, 16, dtype=pipe.vae.dtype)
    latents = pipe.vae.encode(pixels).latent_dist.sample()[0]
    return {
        "latents": latents,
        "half": latents.mT[..., ::2],
        "mean": latents.float().mean().numpy(),
        "noise": np.random.rand(item),
    }


@pytest.mark.slow
@pytest.mark.libraries
def test_results_are_those_of_a_loop_with_the_library(saved, tmp_path):
    source = saved("stable-diffusion")
    arguments = {"source": source, "components": ["vae"], "torch_dtype": torch.bfloat16}
    made = dataprep.write(encode, range(COUNT), tmp_path / "a", procs=2, shard_items=8, **arguments)
    dataprep.write(encode, range(COUNT), tmp_path / "b", procs=0, shard_items=8, **arguments)
    assert content_of(tmp_path / "a") == content_of(tmp_path / "b")
    assert (made.items, made.added, made.failed, made.shards) == (COUNT, COUNT, 0, 4)
    assert made.nbytes == sum(path.stat().st_size for path in tmp_path.glob("a/*.safetensors"))
    pipe = reference(str(source), torch.bfloat16, unet=None, text_encoder=None, safety_checker=None)
    found = {}
    for path in (tmp_path / "a").glob("*.safetensors"):
        found |= load_file(path)
    for item in range(COUNT):
        seed_generators(0, item)
        with torch.no_grad(), limited_threads(1):
            wanted = encode(pipe, item)
        for name, array in wanted.items():
            right = torch.as_tensor(array)
            got = found.pop(f"{item:08}/{name}")
            assert (got.dtype, got.shape) == (right.dtype, right.shape)
            assert torch.equal(got, right)
    assert not found


def test_what_is_finished_is_found_without_loading_anything(light_job, folder):
    light_job().write(squares, range(COUNT), folder)
    before = content_of(folder)
    job = light_job("Handle.load = lambda handle: note('loading') or time.sleep(1000)")
    made = job.write(squares, range(COUNT), folder)
    assert (made.items, made.added) == (COUNT, 0)
    assert content_of(folder) == before


def one_fails(pipe, item):
    return squares(pipe, 1 // item)


@pytest.mark.parametrize("procs", [0, 2])
def test_where_nothing_is_left_to_do_no_process_starts(light_server, pipeline, folder, procs):
    arguments = {"source": pipeline, "errors": "pass"}
    light_server()
    dataprep.write(one_fails, range(3), folder, **arguments)
    program = light_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shmload.Handle, "load", lambda handle: pytest.fail("it loads"))
        made = dataprep.write(one_fails, range(3), folder, procs=procs, **arguments)
    assert (made.items, made.added, made.failed, made.failed_before) == (3, 0, 1, 1)
    assert notes(program) == []


AGAIN = """
import sys
from shmload.integrations import dataprep
made = dataprep.write(None, range(3), sys.argv[1], source=sys.argv[2], errors="pass")
print("FOUND", made.failed_before, {"torch", "diffusers", "transformers"} & sys.modules.keys())
"""


def test_finished_folder_is_found_without_importing_a_library(
    light_server, pipeline, folder, new_child, monkeypatch
):
    light_server()
    dataprep.write(one_fails, range(3), folder, source=pipeline, errors="pass")
    monkeypatch.undo()  # `new_child` starts a real Python
    again = new_child(AGAIN, folder, pipeline)
    assert again.expect("FOUND") == "1 set()"
    assert again.wait() == 0


# Errors -------------------------------------------------------------------------------------------


def test_same_error_at_every_item_ends_the_job_at_once(light_job, folder, log, caplog):
    def never(pipe, item):
        log.note(item)
        return pipe.text_encoder_2

    job = light_job()
    with pytest.raises(shmload.JobFailed, match=r"first 8 items failed .* 'NoneType'"):
        job.write(never, range(1000), folder, errors="pass")
    assert len(log.take()) < 8 + 4 * 2
    assert caplog.text == ""
    assert job.write(squares, range(COUNT), folder, facts={"size": "1"}).added == COUNT


def test_deadly_item_stands_in_the_index(light_job, folder):
    def deadly(pipe, item):
        if item == 2:
            os._exit(3)
        return {}

    made = light_job().write(deadly, range(5), folder)
    assert (made.added, made.failed) == (4, 1)
    ((key, error),) = Results(folder).errors.items()
    assert key == "00000002"
    assert error == "3 processes ended at it (exit code 3, exit code 3, exit code 3)"


REFUSED = {
    "torch.zeros(3)": "the function returned a Tensor; to be stored, a result must be a dict",
    "None": "the function returned a NoneType;",
    "{'a': 'text'}": "'a' is a str; it must be a tensor or a numpy array",
    "{'a': [1.0]}": "'a' is a list;",
    "{'a': np.array(['text'])}": "'a' is a ndarray <U4;",
    "{'a': np.zeros(2, complex)}": "'a' is a ndarray complex128;",
    "{'a': torch.zeros(2, dtype=torch.cdouble)}": "'a' is a Tensor torch.complex128;",
    "{'a': torch.eye(2).to_sparse()}": "'a' has the layout torch.sparse_coo; give a dense tensor",
    "{'a/b': np.zeros(2)}": "'a/b' cannot be the name of an array;",
    "{'': np.zeros(2)}": "'' cannot be the name of an array;",
    "{3: np.zeros(2)}": "3 cannot be the name of an array;",
}


@pytest.mark.slow
def test_results_that_cannot_be_stored_are_errors_of_their_items(light_job, folder):
    def evaluate(pipe, expression):
        import numpy as np
        import torch

        return eval(expression, {"np": np, "torch": torch})

    job = light_job()
    items = [*REFUSED, "{}"]
    assert job.write(evaluate, items, folder, key=str, errors="pass").failed == len(REFUSED)
    errors = Results(folder).errors
    assert list(errors) == list(REFUSED)
    for expression, message in REFUSED.items():
        assert errors[expression].startswith(f"TypeError: {message}")
    with pytest.raises(shmload.ItemFailed, match="item 1, 'None': TypeError: the function"):
        job.write(evaluate, ["{}", "None"], folder.with_name("other"))


def test_two_items_with_one_key_are_an_error(light_job, folder):
    job = light_job()
    with pytest.raises(shmload.DuplicateKey, match="items 0 and 7 have the same key 'k0'"):
        job.write(squares, range(COUNT), folder, key=lambda item: f"k{item % 7}")


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (lambda item: item, shmload.ArgumentError, "the key 0 is a int"),
        (lambda item: item.name, AttributeError, "no attribute 'name'"),
    ],
)
def test_key_that_is_none_is_an_error_and_harms_nothing(light_job, folder, key, error, message):
    job = light_job()
    with pytest.raises(error, match=message):
        job.write(squares, range(3), folder, key=key)
    assert job.write(squares, range(3), folder).items == 3


@pytest.mark.parametrize("facts", [{"size": 512}, {"seed": "1"}, {"pipeline": "mine"}])
def test_fact_that_is_no_text_or_known_already_is_refused(light_job, folder, facts):
    job = light_job()
    with pytest.raises(shmload.ArgumentError, match=min(facts)):
        job.write(squares, range(3), folder, facts=facts)
    assert job.write(squares, range(3), folder).added == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "fact 'seed' is '0' there, and '1' now"),
        ({"threads": 2}, "fact 'threads' is '1' there, and '2' now"),
        ({"torch_dtype": "bf16"}, "fact 'torch_dtype' is 'null' there"),
        ({"components": ["unet"]}, "fact 'components' is 'all' there, and 'unet' now"),
        ({"facts": {"size": "64"}}, "fact 'size' is None there, and '64' now"),
        ({"shard_items": 4}, "shard_items is 8 there, and 4 now"),
        ({"pipeline": None}, "fact 'pipeline' is"),
    ],
)
def test_what_was_made_otherwise_is_refused(light_server, pipeline, folder, change, message):
    light_server()
    arguments = {"source": pipeline, "procs": 0, "shard_items": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shmload.Handle, "load", lambda handle: None)
        dataprep.write(squares, range(3), folder, **arguments)
        if "pipeline" in change:
            change = {}
            os.utime(pipeline / "unet" / "diffusion_pytorch_model.safetensors", ns=(1, 1))
        before = content_of(folder)
        with pytest.raises(shmload.ResultsMismatch) as caught:
            dataprep.write(squares, range(3), folder, **arguments | change)
    assert message in str(caught.value)
    assert content_of(folder) == before


def test_bar_counts_what_was_there_too(light_job, folder, capsys):
    job = light_job()
    job.write(squares, range(3), folder, progress=True)
    job.write(squares, range(5), folder, progress=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "5/5" in shown
