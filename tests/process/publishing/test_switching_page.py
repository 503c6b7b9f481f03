"""The examples on the page for several models run as printed, and the server keeps its budget."""

import io
from concurrent.futures import ThreadPoolExecutor

import diffusers
import numpy as np
import pytest
import torch
from adapters import save_lora
from pages import blocks
from PIL import Image
from pipelines import build, save

import shmload

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

_MODELS = "photo", "anime", "cartoon"
_STYLES = {"ink": 0.8, "wash": 0.6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the models and the styles that the page names."""
    folder = tmp_path_factory.mktemp("page") / "path" / "to"
    for number, name in enumerate(_MODELS):
        save("stable-diffusion", folder / name, seed=number)
    for number, name in enumerate(_STYLES):
        save_lora(build("stable-diffusion").unet, folder / f"{name}.safetensors", seed=number)
    return folder.parents[1]


def pipeline_of(folder, name):
    """Load a model, or a style of one, by the library alone."""
    model, _, style = name.partition("-")
    source = folder / "path" / "to" / model
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)
    if style:
        pipe.load_lora_weights(source.parent, weight_name=f"{style}.safetensors")
        pipe.fuse_lora(lora_scale=_STYLES[style])
        pipe.unload_lora_weights()
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
def test_server_makes_all_pictures_within_its_budget(folder, monkeypatch):
    pytest.importorskip("fastapi")
    plan = shmload.plan(folder / "path/to/photo", dtype="bfloat16", keep=True)
    # Three models are 3, and each style half of one, with its structure.
    budget = plan.decode_nbytes * 4
    (server,) = [each for each in blocks("switching.md") if "FastAPI(" in each]
    monkeypatch.chdir(folder)
    space, size = {}, 16
    exec(server.replace('"20GiB"', str(budget)), space)
    wanted = {}
    for name in space["MODELS"]:
        seed = torch.Generator().manual_seed(0)
        call = {"num_inference_steps": 2, "height": size, "width": size, "generator": seed}
        wanted[name] = np.array(pipeline_of(folder, name)("a cat", **call).images[0])

    def is_right(name):
        png = space["make"](name, "a cat", seed=0, steps=2, size=size).body
        return (np.array(Image.open(io.BytesIO(png))) == wanted[name]).all()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_right, [*wanted] * 4))
    with pytest.raises(space["HTTPException"], match="no model"):
        space["make"]("nothing", "a cat")
    figures = space["figures"]()
    assert figures["hits"] + figures["loads"] == 4 * len(wanted)
    assert figures["held_nbytes"] <= budget
    space["switcher"].close()


def test_example_switches(folder, monkeypatch):
    monkeypatch.chdir(folder)
    shmload.publish(shmload.load_pipeline("path/to/cartoon", keep=True), "watercolour")
    space = {}
    exec(blocks("switching.md")[0], space)
    space["switcher"].close()
    assert space["image"].size == (16, 16)


def test_examples_update(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    trained = shmload.load_pipeline("path/to/cartoon", keep=True)
    shmload.publish(trained, "watercolour")
    with torch.no_grad():
        trained.unet.conv_in.weight.add_(1)
    spaces = [{"shmload": shmload, "trained": trained} for _ in blocks("switching.md")[2:]]
    for example, space in zip(blocks("switching.md")[2:], spaces, strict=True):
        exec(example, space)
    _, reader, loaded = spaces
    assert capsys.readouterr().out == "shm:watercolour@2\n"
    assert torch.equal(reader["pipe"].unet.conv_in.weight, trained.unet.conv_in.weight)
    wanted = pipeline_of(folder, "cartoon")
    assert torch.equal(loaded["pipe"].unet.conv_in.weight, wanted.unet.conv_in.weight)
