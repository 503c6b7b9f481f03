"""Weights that lie in no segment are counted after each load, and said."""

import diffusers
import msgspec
import pytest
import torch
from pipelines import FAMILIES

import shmload
from shmload._building import mapped
from shmload._building.mapped import say_what_is_private
from shmload._checkpoints.resolve import resolve
from shmload._checkpoints.wanted import Wanted
from shmload._wording import format_nbytes

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

_LINE = "of its weights lie in no segment"
_BF16 = torch.bfloat16


@pytest.fixture
def said(caplog, monkeypatch):
    """A function that returns the lines about private weights, with their levels, so far."""
    monkeypatch.setattr(mapped, "LEAST_NBYTES", 1)
    caplog.set_level("INFO", "shmload")
    return lambda: [
        (each.levelname, each.getMessage()) for each in caplog.records if _LINE in each.getMessage()
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines_have_none(saved, said, family):
    for dtype, keep in ((_BF16, True), (_BF16, False), (None, "converted")):
        shmload.load_pipeline(saved(family), dtype=dtype, keep=keep)
    assert said() == []


class Copying(diffusers.StableDiffusionPipeline):
    """A pipeline that copies a model's weights when it is built, as some libraries do."""

    def __init__(
        self, vae, text_encoder, tokenizer, unet, scheduler, safety_checker, feature_extractor
    ):
        for parameter in unet.parameters():
            parameter.data = parameter.data.clone()
        super().__init__(
            *(vae, text_encoder, tokenizer, unet, scheduler, safety_checker, feature_extractor)
        )


def test_copied_weights_are_counted_by_component(saved, said, monkeypatch):
    source = saved("stable-diffusion")
    pipe = shmload.load_pipeline(source, dtype=_BF16, pipeline_class=Copying)
    nbytes = sum(each.nbytes for each in pipe.unet.parameters())
    size = format_nbytes(nbytes)
    why = "cast, joined or copied by the library"
    text = f"{source}: {size} {_LINE}, and are private to this process: unet {size} ({why})"
    assert said() == [("INFO", text)]
    monkeypatch.setattr(mapped, "_MUCH_NBYTES", nbytes)
    shmload.load_pipeline(source, dtype=_BF16, pipeline_class=Copying)
    assert said()[1] == ("WARNING", text)
    monkeypatch.setattr(mapped, "LEAST_NBYTES", nbytes + 1)
    shmload.load_pipeline(source, dtype=_BF16, pipeline_class=Copying)
    assert len(said()) == 2


def test_models_that_were_passed_in_are_not_counted(saved, said):
    source = saved("stable-diffusion")
    unet = diffusers.UNet2DConditionModel.from_config(source / "unet")
    shmload.load_pipeline(source, unet=unet)
    assert said() == []


def test_reasons(saved, said):
    found = resolve(Wanted(source="given"), saved("stable-diffusion"))
    unet = tuple(each for each in found.checkpoints if each.component == "unet")
    source = msgspec.structs.replace(found, checkpoints=unet, unread=("vae",))
    names = ("unet", "vae", "prior", "passed")
    models = {name: torch.nn.Linear(8, 8, bias=False) for name in names}
    buffer = torch.nn.Module()
    buffer.register_buffer("computed", torch.zeros(100), persistent=False)
    tensors = [each.weight for each in models.values()] + [buffer.computed]
    sizes = {each.untyped_storage().data_ptr(): each.nbytes for each in tensors}
    say_what_is_private(sizes, {**models, "buffer": buffer, "other": 1}, source, {"passed": 1})
    assert said()[0][1].partition("this process: ")[2].split(", ") == [
        *("unet 256 B (cast", "joined or copied by the library)"),
        "vae 256 B (its files are left to the library)",
        "prior 256 B (from another source)",
    ]
