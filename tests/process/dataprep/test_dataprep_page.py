"""The page's examples for data-prep jobs call existing functions, and most of them run."""

import ast
import inspect
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from shmload.integrations import dataprep
from shmload.integrations.results import Results

PAGE = re.findall(
    r"^```python\n(.*?)^```",
    (Path(__file__).parents[3] / "docs" / "dataprep.md").read_text(),
    re.M | re.S,
)


def block_with(text):
    (found,) = [block for block in PAGE if text in block]
    return found


PAGE_OF = {
    "parquet": block_with("import pyarrow.parquet"),
    "webdataset": block_with("webdataset.handle_extension"),
}


def test_calls_on_the_page_have_arguments_that_there_are():
    functions = {"dataprep.map": dataprep.map, "dataprep.write": dataprep.write}
    methods = {"job.map": dataprep.Job.map, "job.write": dataprep.Job.write}
    seen = set()
    for node in (node for block in PAGE for node in ast.walk(ast.parse(block))):
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if name not in {*functions, *methods, "dataprep.Job"}:
            continue
        seen.add(name)
        given = {keyword.arg: None for keyword in node.keywords}
        places = [None] * len(node.args)
        if name in functions:
            bound = inspect.signature(functions[name]).bind(*places, **given)
            source, given = None, bound.arguments.get("job_kwargs", {})
            inspect.signature(dataprep.Job).bind(source, **given)
            assert given.keys() <= inspect.signature(dataprep.Job).parameters.keys()
        elif name in methods:
            inspect.signature(methods[name]).bind(None, *places, **given)
        else:
            inspect.signature(dataprep.Job).bind(*places, **given)
            assert given.keys() <= inspect.signature(dataprep.Job).parameters.keys()
    assert seen >= {"dataprep.map", "dataprep.write", "dataprep.Job", "job.map"}


def test_wrong_argument_would_be_noticed():
    with pytest.raises(TypeError, match="unexpected"):
        inspect.signature(dataprep.Job.map).bind(None, None, None, as_complete=True)


@pytest.mark.slow
def test_first_job_runs(saved, tmp_path):
    paths = []
    for number in range(3):
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(np.full((20, 30, 3), 40 * number, np.uint8)).save(paths[-1])
    code = block_with("dataprep.map(encode, paths").replace("    ...", "    seen.append(latents)")
    assert "path/to/stable-diffusion" in code
    code = code.replace("path/to/stable-diffusion", str(saved("stable-diffusion")))
    code = code.replace("512, 512", "64, 64").replace("procs=4", "procs=2")
    seen = []
    exec(code, {"__name__": "__main__", "paths": paths, "seen": seen})
    assert [latents.shape for latents in seen] == [(1, 4, 32, 32)] * 3


def test_first_folder_is_written(saved, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture = tmp_path / "cat.png"
    Image.fromarray(np.full((20, 30, 3), 40, np.uint8)).save(picture)
    define, _, _ = block_with("dataprep.map(encode, paths").partition("for latents")
    code = define.replace("512, 512", "64, 64") + block_with("dataprep.write(encode_all, pictures")
    code = code.replace("source=...", f"source={str(saved('stable-diffusion'))!r}")
    code = code.replace("procs=4", "procs=0")
    exec(code, {"__name__": "__main__", "pictures": [picture]})
    assert Results("latents")["cat.png"]["latents"].shape == (1, 4, 32, 32)


@pytest.mark.filterwarnings("ignore:unclosed file")  # webdataset leaves that to the collector
def test_samples_of_tars_are_items_as_shown(light_job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pictures").mkdir()
    for tar in range(2):
        with webdataset.TarWriter(f"pictures/{tar}.tar") as writer:
            for number in range(3):
                writer.write({"__key__": f"{tar}-{number}", "png": bytes([tar, number])})
    job = light_job()
    code = block_with("def encode_sample").replace("dataprep.write(", "write(")
    write = lambda *args, source, components, procs, **more: job.write(*args, **more)  # noqa: E731
    encode = lambda pipe, file: np.frombuffer(file.read(), np.uint8)  # noqa: E731
    exec(code, {"__name__": "__main__", "write": write, "encode": encode})
    found = {key: tensors["latents"].tolist() for key, tensors in Results("latents").items()}
    assert found == {f"{tar}-{n}": [tar, n] for tar in range(2) for n in range(3)}


def test_results_are_read_as_shown(light_job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    items = [np.full(3, number, np.float32) for number in range(40)]
    job = light_job()
    job.write(lambda pipe, item: {"latents": item, "text.0": -item}, items, "latents")
    code = block_with("class Latents(Dataset)")
    code = code.replace("    ...", "    seen.append((latents, embeddings))")
    seen = []
    exec(code.replace("num_workers=4", "num_workers=0"), {"seen": seen})
    assert [len(latents) for latents, _ in seen] == [32, 8]
    assert sorted(float(latent[0]) for latents, _ in seen for latent in latents) == list(range(40))
    assert all((latents == -embeddings).all() for latents, embeddings in seen)


@pytest.mark.filterwarnings("ignore:unclosed file")  # webdataset leaves that to the collector
@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_other_formats_are_read_as_shown(light_job, tmp_path, monkeypatch, format):
    monkeypatch.chdir(tmp_path)
    items = [np.full((3, 2), number).astype(ml_dtypes.bfloat16) for number in range(7)]
    job = light_job()
    key = lambda item: f"a/{int(item[0, 0])}.png"  # noqa: E731
    arguments = {"key": key, "shard_items": 3, "format": format}
    job.write(lambda pipe, item: {"latents": item}, items, "latents", **arguments)
    (line,) = [line for line in PAGE_OF[format].splitlines() if "key, latents = " in line]
    indent = line[: len(line) - len(line.lstrip())]
    seen = {}
    code = PAGE_OF[format].replace(line, f"{line}\n{indent}seen[key] = latents")
    exec(code, {"seen": seen})
    assert list(seen) == [f"a/{number}.png" for number in range(7)]
    for number, latent in enumerate(seen.values()):
        assert latent.dtype is torch.bfloat16
        assert latent.tolist() == [[number] * 2] * 3
