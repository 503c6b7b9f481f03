"""Jobs with a pipeline, in any kind of program; and the example, a whole job."""

import json
import os
import re
import sys
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from children import run_to_end
from PIL import Image
from watching import until

import shmload
from shmload.integrations import dataprep

_EXAMPLE = Path(__file__).parents[3] / "examples" / "encode_dataset.py"
_ARGUMENTS = {"components": ["vae"], "dtype": "bfloat16", "procs": 2}


def encode(pipe, item):
    import torch

    pixels = torch.full((1, 3, 16, 16), item / 8, dtype=pipe.vae.dtype)
    return {"latents": pipe.vae.encode(pixels).latent_dist.mean[0]}


@pytest.mark.slow
def test_results_are_those_of_a_loop_with_the_library(saved, folder, shm_names):
    source = saved("stable-diffusion")
    before = shm_names()
    with dataprep.Job(source, **_ARGUMENTS) as job:
        mapped = list(job.map(encode, range(6)))
        job.write(encode, range(6), folder, shard_items=4)
    assert shm_names() == before
    pipe = diffusers.DiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)
    with torch.no_grad():
        looped = [encode(pipe, item) for item in range(6)]
    for one, other, wanted in zip(mapped, dataprep.Results(folder), looped, strict=True):
        assert torch.equal(one["latents"], other["latents"])
        torch.testing.assert_close(one["latents"], wanted["latents"])
    for change, said in [
        ({"dtype": "float32"}, "its dtype is"),
        ({"device": "cuda"}, "its device is 'cpu', and now 'cuda'"),
    ]:
        with (
            dataprep.Job(source, **_ARGUMENTS | change) as job,
            pytest.raises(shmload.ResultsError, match=said),
        ):
            job.write(encode, range(6), folder, shard_items=4)


@pytest.mark.slow
def test_errors_of_loading_come_out(copied, saved):
    with pytest.raises(shmload.SourceNotFound):
        dataprep.Job("/no/such/pipeline")
    with pytest.raises(shmload.ArgumentError, match="do not give components"):
        dataprep.Job(shmload.Handle.of(saved("stable-diffusion")), components=["vae"])
    source = copied("stable-diffusion")
    with (
        dataprep.Job(source, **_ARGUMENTS, device="cuda:99") as job,
        pytest.raises(shmload.ArgumentError, match=r"torch finds . of 'cuda' here"),
    ):
        list(job.map(encode, [1]))
    with dataprep.Job(source, **_ARGUMENTS) as job:
        path = source / "vae" / "diffusion_pytorch_model.safetensors"
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(shmload.ShardTruncated):
            list(job.map(encode, [1]))


@pytest.mark.slow
def test_nothing_outlives_a_program_that_is_killed(saved, child, shm_names):
    code = """
import os, sys, signal
from shmload.integrations import dataprep
def work(pipe, item):
    print("AT", os.getpid(), os.getppid(), flush=True)
    signal.pause()
with dataprep.Job(sys.argv[1], components=["vae"], procs=1) as job:
    list(job.map(work, [1]))
"""
    before = shm_names()
    owner = child(code, saved("stable-diffusion"))
    pids = owner.expect("AT").split()
    owner.process.kill()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    until(lambda: shm_names() == before)


# Programs -----------------------------------------------------------------------------------------

PROGRAM = """
import multiprocessing, sys
from concurrent.futures import ThreadPoolExecutor
from shmload.integrations import dataprep

offset = 40

def plus(pipe, item):
    return item + offset

def beside(pipe, item):
    import helping
    return helping.help(item)

def use(queue=None):
    with dataprep.Job(None, procs=2) as job:
        found = list(job.map(plus, [1, 2]))
    if queue:
        queue.put(found)
    return found

print(use())
with dataprep.Job(None, procs=2) as job:
    offset = 50
    print(list(job.map(plus, [1, 2])), list(job.map(lambda pipe, item: -item, [1, 2])))
    print(list(job.map(beside, [1])))
queue = multiprocessing.get_context("fork").SimpleQueue()
process = multiprocessing.get_context("fork").Process(target=use, args=(queue,), daemon=True)
process.start()
print(queue.get())
process.join()
with ThreadPoolExecutor(3) as threads:
    print(list(threads.map(lambda _: use(), range(3))))
"""
SAID = """[41, 42]
[51, 52] [-1, -2]
['helped 1']
[51, 52]
[[51, 52], [51, 52], [51, 52]]
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "stdin"])
def test_program_needs_no_guard_and_no_module(tmp_path, how):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "helping.py").write_text("def help(item):\n    return f'helped {item}'\n")
    command = [sys.executable, "-W", "ignore", "program.py" if how == "script" else "-"]
    done = run_to_end(command, cwd=tmp_path, input=PROGRAM)
    assert (done.returncode, done.stdout) == (0, SAID), done.stderr


# The example --------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    """Twelve pictures in folders, a file that is none, and captions in COCO's form."""
    folder = tmp_path / "pictures"
    random = np.random.default_rng(0)
    names = [f"{number % 2}/{number:02}.{('png', 'jpg')[number % 2]}" for number in range(12)]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (20, 40, 3), np.uint8)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text(f"the red cat {name}\n")
    (folder / "0" / "broken.png").write_bytes(b"no picture")
    images = [{"id": number, "file_name": name} for number, name in enumerate(names)]
    notes = [{"image_id": n, "caption": f"the red cat {name}"} for n, name in enumerate(names)]
    (tmp_path / "coco.json").write_text(json.dumps({"images": images, "annotations": notes}))
    rows = "".join(f'"{name}","the red cat {name}"\n' for name in names)
    (tmp_path / "table.csv").write_text(f"file_name,text\n{rows}")
    return folder


@pytest.fixture
def run_example(saved, pictures, tmp_path):
    def run(out, *options):
        arguments = [saved("stable-diffusion"), pictures, tmp_path / out, "--size", "64"]
        options = ("--procs", 2, "--shard-items", 5, *options)
        words = map(str, (_EXAMPLE, *arguments, *options))
        return run_to_end([sys.executable, "-W", "ignore", *words])

    return run


@pytest.mark.slow
@pytest.mark.timeout(300)  # several programs, each with its imports
def test_example_encodes_pictures_and_captions(run_example, tmp_path, digest_of):
    done = run_example("beside")
    assert done.returncode == 3, done.stderr
    assert done.stdout.endswith("beside: 13 pictures, 13 now, 1 failed\n")
    results = dataprep.Results(tmp_path / "beside")
    assert [*results.errors] == ["0/broken.png"]
    assert "cannot identify image file" in results.errors["0/broken.png"]
    found = results["1/01.jpg"]
    assert found["latents"].shape == (4, 32, 32)
    assert found["text.0"].ndim == 2
    assert not torch.equal(found["text.0"], results["0/02.png"]["text.0"])
    done = run_example("coco", "--captions", tmp_path / "coco.json")
    assert "12 of 13 pictures have a caption" in done.stderr
    assert digest_of(tmp_path / "coco") == digest_of(tmp_path / "beside")
    done = run_example("beside", "--dtype", "float32")
    assert done.returncode == 1
    assert re.match("encode_dataset: .*has the results of another job", done.stderr.split("\n")[-2])


def test_example_reads_captions_of_each_form(pictures, tmp_path):
    example = {"__name__": "example"}
    exec(_EXAMPLE.read_text(), example)
    wanted = example["read_captions"](tmp_path / "coco.json")
    assert wanted["1/01.jpg"] == "the red cat 1/01.jpg"
    assert example["read_captions"](tmp_path / "table.csv") == wanted
    assert example["find_pictures"](pictures) == sorted([*wanted, "0/broken.png"])
