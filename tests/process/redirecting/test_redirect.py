"""`redirect`: when it is on, what it patches, and what happens where shmload cannot load."""

import asyncio
import logging

import accelerate
import diffusers
import pytest
import torch
import transformers
from redirecting import assert_same

import shmload
from shmload._redirecting import calls
from shmload.errors import ArgumentError, SharedMemoryFull

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

_CLASSES = [
    diffusers.DiffusionPipeline,
    diffusers.AutoPipelineForText2Image,
    diffusers.AutoPipelineForImage2Image,
    diffusers.AutoPipelineForInpainting,
    diffusers.ModelMixin,
    diffusers.AutoModel,
    transformers.PreTrainedModel,
    transformers.AutoModel,
    transformers.AutoModelForCausalLM,
]


def attributes():
    return [vars(cls)["from_pretrained"] for cls in _CLASSES]


# On and off ---------------------------------------------------------------------------------------


def test_last_one_restores_in_any_order():
    before = attributes()
    first, second = shmload.redirect(), shmload.redirect()
    assert not any(one is other for one, other in zip(attributes(), before, strict=True))
    first.close()
    assert attributes() != before
    with shmload.redirect():
        second.close()
        assert attributes() != before
    assert attributes() == before
    second.close()
    assert attributes() == before


def test_patch_of_another_program_survives(saved, ways, monkeypatch):
    source = str(saved("stable-diffusion"))
    seen = []
    before = vars(diffusers.DiffusionPipeline)["from_pretrained"]
    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", before)  # in the end
    redirection = shmload.redirect()
    inner = diffusers.DiffusionPipeline.from_pretrained.__func__

    def theirs(cls, path, **kwargs):
        seen.append(path)
        return inner(cls, path, **kwargs)

    diffusers.DiffusionPipeline.from_pretrained = classmethod(theirs)
    kept = vars(diffusers.DiffusionPipeline)["from_pretrained"]
    diffusers.StableDiffusionPipeline.from_pretrained(source)
    assert (seen, ways.taken) == ([source], ["library"])
    redirection.close()
    assert vars(diffusers.DiffusionPipeline)["from_pretrained"] is kept
    diffusers.StableDiffusionPipeline.from_pretrained(source)
    with shmload.redirect():
        diffusers.StableDiffusionPipeline.from_pretrained(source)
    assert (seen, ways.taken) == ([source] * 3, ["library"] * 2)


def test_options_of_the_last_open_one_count(saved, capsys):
    source = str(saved("stable-diffusion"))
    load = diffusers.UNet2DConditionModel
    with shmload.redirect(), shmload.redirect(verbose=True):
        load.from_pretrained(source, subfolder="unet")
    text = f"shmload: UNet2DConditionModel.from_pretrained('{source}'): through shmload, in"
    assert text in capsys.readouterr().err
    with shmload.redirect():
        load.from_pretrained(source, subfolder="unet")
    assert "shmload" not in capsys.readouterr().err


@pytest.mark.parametrize("given", [{"keep": "yes"}, {"keep": 1.5}, {"verbose": "INFO"}])
def test_wrong_options_are_refused(given):
    before = attributes()
    with pytest.raises(ArgumentError, match=next(iter(given))):
        shmload.redirect(**given)
    assert attributes() == before


# What stays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "dtype", "stay"),
    [
        ("converted", torch.bfloat16, True),
        ("converted", torch.float32, False),
        (True, torch.float32, True),
        (False, torch.bfloat16, False),
    ],
)
def test_what_had_to_be_made_stays(saved, shm_names, keep, dtype, stay):
    with shmload.redirect(keep=keep):
        model = diffusers.UNet2DConditionModel.from_pretrained(
            str(saved("stable-diffusion")), subfolder="unet", torch_dtype=dtype
        )
    del model
    assert bool(shm_names()) is stay


# Whose calls --------------------------------------------------------------------------------------


def test_own_loads_are_not_redirected(saved, ways):
    source = saved("stable-diffusion")
    with shmload.redirect():
        shmload.load_pipeline(source, dtype="bfloat16")
        shmload.load_model("UNet2DConditionModel", source, subfolder="unet")
    assert ways.lines == []


def test_threads_are_redirected_each(saved, ways):
    source = str(saved("stable-diffusion"))

    async def load_all():
        load = diffusers.UNet2DConditionModel.from_pretrained
        await asyncio.gather(*(asyncio.to_thread(load, source, subfolder="unet") for _ in range(3)))

    with shmload.redirect():
        asyncio.run(load_all())
    assert ways.taken == ["shmload"] * 3


# Failures -----------------------------------------------------------------------------------------


def test_library_loads_where_there_is_no_room(saved, ways, monkeypatch):
    def full(*args, **kwargs):
        raise SharedMemoryFull("there is no room")

    monkeypatch.setattr("shmload._loading.holdings.Holdings.make_parts", full)
    source = str(saved("stable-diffusion"))
    load = diffusers.UNet2DConditionModel
    assert_same(
        lambda: load.from_pretrained(source, subfolder="unet", torch_dtype=torch.bfloat16), ways
    )
    assert ways.levels == [logging.WARNING]
    assert "by the library: SharedMemoryFull: " in ways.lines[0]


def test_broken_file_raises_the_librarys_error(copied, ways):
    source = copied("stable-diffusion")
    path = source / "unet" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert_same(lambda: diffusers.DiffusionPipeline.from_pretrained(str(source)), ways)
    assert ways.taken == ["library"]
    assert ways.levels == [logging.INFO]


# Surroundings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "surroundings",
    [lambda: torch.device("meta"), torch.inference_mode, accelerate.init_empty_weights],
    ids=["device", "inference", "empty-weights"],
)
def test_unusual_surroundings_are_left_to_the_library(saved, ways, surroundings):
    source = str(saved("stable-diffusion"))
    with shmload.redirect(), surroundings():
        diffusers.UNet2DConditionModel.from_pretrained(source, subfolder="unet")
    assert ways.taken == ["library"]


# The hub ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("commit", "way"),
    [("a" * 40, "shmload"), ("b" * 40, "library"), (None, "shmload")],
    ids=["current", "older", "unreachable"],
)
def test_hub_id_is_redirected_if_the_cache_is_current(
    saved, hub_cache, ways, monkeypatch, commit, way
):
    hub_cache.add("me/model", saved("stable-diffusion"))
    monkeypatch.setattr(calls, "is_offline", lambda: False)
    monkeypatch.setattr(calls, "commit_on_hub", lambda repo_id, hub: commit)
    assert_same(
        lambda: diffusers.DiffusionPipeline.from_pretrained("me/model", cache_dir=hub_cache.root),
        ways,
        are_texts_same=False,  # diffusers says that it is offline
    )
    assert ways.taken == [way], ways.lines


# Imports ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import diffusers, transformers; "], ids=["none", "all"])
def test_classes_are_patched_when_they_are_imported(new_child, before):
    code = f"""
import sys
{before}
import shmload
redirection = shmload.redirect()
print("torch", "torch" in sys.modules)
import diffusers
from transformers import AutoModel, CLIPTextModel
from diffusers.pipelines import DiffusionPipeline
def say():
    print("found", *["_redirecting" in cls.from_pretrained.__func__.__code__.co_filename for cls in
            (AutoModel, CLIPTextModel, DiffusionPipeline, diffusers.UNet2DConditionModel,
             diffusers.AutoModel, diffusers.AutoPipelineForText2Image)])
say()
redirection.close()
say()
print("finder", any("Finder" == type(each).__name__ for each in sys.meta_path))
"""
    child = new_child(code)
    assert child.expect("torch") == str(bool(before))
    assert child.expect("found") == " ".join(["True"] * 6)
    assert child.expect("found") == " ".join(["False"] * 6)
    assert child.expect("finder") == "False"
    assert child.wait() == 0
