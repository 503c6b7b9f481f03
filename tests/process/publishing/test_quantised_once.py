"""With `keep=True` the library quantises in one process, and the others attach what it made."""

from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch
from comparing import assert_modules_equal
from diffusers import AutoencoderKL
from halving import Halves, HalvingConfig, HalvingQuantizer
from mappings import copied_nbytes

import shmload
from shmload._building import code, remembered

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

SUPPORT = Path(__file__).parents[2] / "support"
installed = code._installed


@pytest.fixture
def load(saved):
    """Load a quantised model."""

    def load_quantised(scale=0.01, **kwargs):
        return shmload.load_model(
            AutoencoderKL,
            saved("stable-diffusion"),
            subfolder="vae",
            quantization_config=HalvingConfig(scale),
            **{"keep": True, "progress": False} | kwargs,
        )

    return load_quantised


@pytest.fixture(autouse=True)
def quantiser_is_of_a_library(monkeypatch):
    monkeypatch.setattr(remembered, "_MUCH_NBYTES", 1)
    monkeypatch.setattr(code, "_installed", lambda: (*installed(), str(SUPPORT)))


def kept():
    """Return how much is kept of each object."""
    return [info.kept for info in shmload.segments() if info.kept]


def test_second_load_quantises_nothing_and_copies_nothing(load, saved):
    wanted = AutoencoderKL.from_pretrained(
        saved("stable-diffusion"), subfolder="vae", quantization_config=HalvingConfig()
    )
    before = HalvingQuantizer.runs
    for _ in range(2):
        model = load()
        assert {type(each) for each in model.parameters()} == {Halves, torch.nn.Parameter}
        assert {each.scale for each in model.parameters() if type(each) is Halves} == {0.01}
        assert_modules_equal(model, wanted, "vae")
        assert copied_nbytes(SimpleNamespace(components={"vae": model})) == 0
    assert HalvingQuantizer.runs == before + 1
    assert len(kept()) == 1
    assert not [info for info in shmload.segments() if info.is_pinned]


# Doors --------------------------------------------------------------------------------------------


def of_a_pipeline():
    if not hasattr(diffusers, "PipelineQuantizationConfig"):
        pytest.skip("an older diffusers")
    return diffusers.PipelineQuantizationConfig(quant_mapping={"vae": HalvingConfig()})


def load_pipeline(source, keep):
    given = {"quantization_config": of_a_pipeline(), "progress": False}
    return shmload.load_pipeline(source, keep=keep, **given).vae


def load_redirected(source, keep):
    with shmload.redirect(keep=keep):
        return diffusers.DiffusionPipeline.from_pretrained(
            source, quantization_config=of_a_pipeline()
        ).vae


@pytest.mark.parametrize("keep", [True, "converted"])
@pytest.mark.parametrize("door", [load_pipeline, load_redirected])
def test_any_door_quantises_once(saved, door, keep):
    before = HalvingQuantizer.runs
    first, second = (door(saved("sdxl"), keep) for _ in range(2))
    assert HalvingQuantizer.runs == before + 1
    assert any(isinstance(each, Halves) for each in second.parameters())
    assert_modules_equal(second, first, "vae")
    assert copied_nbytes(SimpleNamespace(components={"vae": second})) == 0


# What can be in the way ---------------------------------------------------------------------------
