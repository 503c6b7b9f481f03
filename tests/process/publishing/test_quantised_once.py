"""With `keep=True` the library quantises in one process, and the others attach what it made."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comparing import assert_modules_equal
from diffusers import AutoencoderKL
from halving import Halves, HalvingConfig, HalvingQuantizer
from mappings import copied_nbytes

import shmload

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

SUPPORT = Path(__file__).parents[2] / "support"


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


def published():
    return sorted(i.source for i in shmload.segments() if i.source.startswith("shm:"))


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
    assert len(published()) == 1
    assert not [info for info in shmload.segments() if info.is_pinned]


def test_another_process_attaches_it(load, saved, new_child):
    model = load()
    child = new_child(
        """
import sys
sys.path.append(sys.argv[2])
import shmload
from halving import HalvingConfig, HalvingQuantizer
model = shmload.load_model(
    "AutoencoderKL", sys.argv[1], subfolder="vae", quantization_config=HalvingConfig(),
    keep=True, progress=False)
print("RUNS", HalvingQuantizer.runs, len(list(model.parameters())), flush=True)
""",
        saved("stable-diffusion"),
        SUPPORT,
    )
    assert child.expect("RUNS") == f"0 {len(list(model.parameters()))}"


@pytest.mark.parametrize(
    "others",
    [{"scale": 0.02}, {"dtype": "bfloat16"}, {"keep": False}, {"device_map": "cpu"}],
    ids=str,
)
def test_other_arguments_are_another_result(load, others):
    load()
    before = HalvingQuantizer.runs
    load(**others)
    assert HalvingQuantizer.runs == before + 1
    assert len(published()) == (1 if {"keep", "device_map"} & others.keys() else 2)


def test_changed_file_is_quantised_again(copied, load):
    source = copied("stable-diffusion")
    given = {"subfolder": "vae", "keep": True, "progress": False}

    def load_copy():
        config = HalvingConfig()
        return shmload.load_model(AutoencoderKL, source, quantization_config=config, **given)

    load_copy()
    before = HalvingQuantizer.runs
    file = source / "vae" / "config.json"
    file.write_text(file.read_text() + "\n")
    load_copy()
    assert HalvingQuantizer.runs == before + 1


def test_pipelines_are_quantised_once_too(saved):
    if not hasattr(pytest.importorskip("diffusers"), "PipelineQuantizationConfig"):
        pytest.skip("an older diffusers")
    from diffusers import PipelineQuantizationConfig

    def load_pipeline():
        config = PipelineQuantizationConfig(quant_mapping={"vae": HalvingConfig()})
        return shmload.load_pipeline(
            saved("stable-diffusion"), quantization_config=config, keep=True, progress=False
        )

    before = HalvingQuantizer.runs
    first, second = load_pipeline(), load_pipeline()
    assert HalvingQuantizer.runs == before + 1
    assert_modules_equal(first.vae, second.vae, "vae")
    assert copied_nbytes(second) == 0


def test_result_is_evicted_like_any_other(load):
    load()
    gc.collect()
    (name,) = published()
    assert shmload.evict(name)
    before = HalvingQuantizer.runs
    load()
    assert HalvingQuantizer.runs == before + 1
