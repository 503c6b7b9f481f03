"""The page's examples run, but for those of map and of your own model."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
from pages import blocks
from PIL import Image

from shmload.integrations import dataprep


def block_with(text):
    (found,) = [block for block in blocks("dataprep.md") if text in block]
    return found


@pytest.mark.slow
def test_first_job_runs(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.full((20, 30, 3), 40, np.uint8)).save("cat.png")
    code = block_with("job.write(encode, paths").replace("512, 512", "64, 64")
    code = code.replace("path/to/stable-diffusion", str(saved("stable-diffusion")))
    done = {"__name__": "__main__", "paths": [Path("cat.png")]}
    exec(code, done)
    assert capsys.readouterr().out == "Report(items=1, computed=1, failed=0, shards=1)\n"
    assert done["latents"].shape == (4, 32, 32)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves files open
@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_other_formats_are_read_as_shown(job, tmp_path, monkeypatch, format):
    monkeypatch.chdir(tmp_path)
    give = lambda pipe, item: {"latents": np.full((2, 3), item, ml_dtypes.bfloat16)}  # noqa: E731
    job().write(give, range(5), "latents", key=str, shard_items=2, format=format)
    code = block_with("pyarrow.parquet" if format == "parquet" else "webdataset.handle_extension")
    seen = {}
    indent = re.findall("^ *(?=key)", code, re.M)[0]
    exec(f"{code}{indent}seen[key] = latents\n", {"seen": seen})
    assert {key: tensor.tolist() for key, tensor in seen.items()} == {
        str(item): [[item] * 3] * 2 for item in range(5)
    }


def test_results_are_read_as_shown(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    give = lambda pipe, item: {"latents": np.ones(2), "text.0": np.full(3, len(item))}  # noqa: E731
    job().write(give, ["cat.png", "a"], "latents", key=str)
    seen = {"dataprep": dataprep}
    exec(block_with("DataLoader("), seen)
    assert sorted(seen["embeddings"][:, 0].tolist()) == [1, 7]
    shard = safetensors.torch.load_file("latents/shard-00000.safetensors")
    assert sorted(shard)[:2] == ["a/latents", "a/text.0"]
