"""Models are listed, named and chosen as a person would do it."""

import os

import pytest
import torch
from safetensors.torch import save_file

import shmload


def save(folder, *components, seed=0):
    """Save a pipeline's directory of one tensor for each component."""
    for number, component in enumerate(components):
        (folder / component).mkdir(parents=True)
        save_file(
            {"weight": torch.full((1000,), float(number + seed))},
            folder / component / "model.safetensors",
        )
        (folder / component / "config.json").write_text("{}")
    (folder / "model_index.json").write_text("{}")
    return folder


def warm(folder, dtype="bfloat16"):
    for component in sorted(folder.iterdir()):
        if component.is_dir():
            shmload.warm(component, torch_dtype=dtype)


@pytest.fixture
def pipelines(tmp_path, evicts):
    """Two pipelines, of which the second one's VAE is a hard link to the first one's."""
    first = save(tmp_path / "stable-diffusion", "unet", "vae")
    second = save(tmp_path / "stable-video", "unet", seed=7)
    (second / "vae").mkdir()
    (second / "vae" / "config.json").write_text("{}")
    os.link(first / "vae" / "model.safetensors", second / "vae" / "model.safetensors")
    return first, second


def names_of(found):
    return [(model.name, model.dtype, model.components) for model in found]


def test_file_of_two_models_is_listed_with_the_one_that_it_was_decoded_for(pipelines):
    for folder in pipelines:
        warm(folder)
    first, second = shmload.models()
    assert names_of((first, second)) == [
        ("stable-diffusion", "bfloat16", ("unet", "vae")),
        ("stable-video", "bfloat16", ("unet",)),
    ]
    assert len(shmload.segments()) == 3
    assert str(shmload.models()).splitlines()[-1].startswith("2 models, 3 segments, ")


def test_model_in_use_names_its_process(pipelines):
    state = shmload.load_state_dict(
        pipelines[0] / "unet" / "model.safetensors", "bfloat16", keep=True
    )
    (model,) = shmload.models()
    assert (model.is_leased, [user.pid for user in model.used_by]) == (True, [os.getpid()])
    assert model.used_by[0].program in str(shmload.models())
    del state
    (model,) = shmload.models()
    assert (model.is_leased, model.used_by) == (False, ())


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["DIFFUSION", "id", "~"])
def test_model_is_removed_by_what_a_person_calls_it(pipelines, pattern, monkeypatch):
    for folder in pipelines:
        warm(folder)
    if pattern == "id":
        pattern = shmload.models()[0].id[:6]
    if pattern == "~":
        monkeypatch.setenv("HOME", str(pipelines[0].parent))
        pattern = "~/stable-diffusion/unet"
    removed = shmload.evict(pattern)
    gone = {info.component for info in removed}
    assert gone == ({"unet"} if "unet" in pattern else {"unet", "vae"})
    assert names_of(shmload.models())[-1] == ("stable-video", "bfloat16", ("unet",))


def test_part_of_several_names_is_refused_with_all_of_them(pipelines):
    for folder in pipelines:
        warm(folder)
    with pytest.raises(shmload.SegmentNotFound, match="stable-diffusion, stable-video") as caught:
        shmload.evict("stable")
    assert caught.value.candidates == ("stable-diffusion", "stable-video")
    assert len(shmload.segments()) == 3


def test_name_means_the_model_in_every_dtype_and_its_id_in_one(pipelines):
    for dtype in ("bfloat16", "float16"):
        warm(pipelines[0], dtype)
    narrow, other = shmload.models()
    assert (narrow.dtype, other.dtype) == ("bfloat16", "float16")
    assert f"{narrow.id}  stable-diffusion" in shmload.models().page(with_ids=True).text()
    assert {info.dtype for info in shmload.evict(other.id)} == {"float16"}
    assert names_of(shmload.models()) == [("stable-diffusion", "bfloat16", ("unet", "vae"))]
    warm(pipelines[0], "float16")
    assert len(shmload.evict("stable-diffusion")) == 4


# The command line ---------------------------------------------------------------------------------


# What is being decoded ----------------------------------------------------------------------------
