"""With `keep=True` the library converts weights in one process, and the others attach them."""

import gc
import json
import shutil
import types

import pytest
import torch
from comparing import assert_equal, assert_modules_equal
from diffusers import StableDiffusionXLPipeline
from diffusers.loaders import single_file_model, single_file_utils
from mappings import copied_nbytes
from safetensors.torch import load_file, save_file

import shmload
from shmload._building import mapped

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]


@pytest.fixture(autouse=True)
def small_ones_count(monkeypatch):
    monkeypatch.setattr(mapped, "_LEAST_NBYTES", 1)


@pytest.fixture
def load(one_file):
    """Load SDXL from one file, in which its second encoder has projections that are joined."""

    def load_file(**given):
        config, path = one_file("sdxl")
        return shmload.load_pipeline(path, config=config, **{"keep": True} | given)

    return load_file


def converted():
    return [info for info in shmload.segments() if ".converted-" in info.source]


def test_second_load_converts_nothing_and_copies_nothing(load, one_file, built):
    config, path = one_file("sdxl")
    wanted = StableDiffusionXLPipeline.from_single_file(str(path), config=config)
    for _ in range(2):
        pipe = load()
        assert_equal(pipe, wanted)
        assert copied_nbytes(pipe) == 0
    assert len(built) == 1
    [info] = converted()
    assert not info.is_pinned
    file = path.stat().st_size
    assert info.nbytes < file / 2  # the weights that are as in the file lie in its segment


def test_another_process_attaches_it(load, one_file, new_child):
    load()
    child = new_child(
        """
import sys
import shmload
from shmload._building.build import Build
Build._build_models = None
pipe = shmload.load_pipeline(sys.argv[1], config=sys.argv[2], keep=True, progress=False)
print("SUM", sum(int(p.double().sum() * 1e3) for p in pipe.text_encoder_2.parameters()), flush=True)
""",
        *one_file("sdxl")[::-1],
    )
    encoder = load().text_encoder_2
    assert child.expect("SUM") == str(
        sum(int(p.double().sum() * 1e3) for p in encoder.parameters())
    )


@pytest.mark.parametrize(
    "others",
    [{"dtype": torch.bfloat16}, {"pipeline_class": "StableDiffusionXLImg2ImgPipeline"}],
    ids=lambda others: next(iter(others)),
)
def test_other_arguments_are_another_result(load, others):
    load()
    made = load(**others)
    assert len(converted()) == 2
    assert_equal(load(**others), made)
    assert len(converted()) == 2


@pytest.mark.parametrize(
    "others",
    [{"keep": False}, {"keep": "converted"}, {"verify": True}, {"device_map": "cpu"}],
    ids=str,
)
def test_what_is_not_asked_for_is_not_kept(load, others):
    load(**others)
    assert converted() == []


def test_experts_that_the_library_joins_are_shared(tmp_path, built):
    transformers = pytest.importorskip("transformers", "5.0")
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
    )
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for _ in range(2):
        model = shmload.load_model("AutoModelForCausalLM", tmp_path, keep=True)
        assert_modules_equal(model, wanted, "model")
        assert copied_nbytes(types.SimpleNamespace(components={"": model})) == 0
    assert len(built) == 1
    assert len(converted()) == 1


# What is not shared -------------------------------------------------------------------------------


class Own(StableDiffusionXLPipeline):
    """A class of the program, which may be another one in the next program."""


def test_class_of_a_program_is_built_by_each(load, built):
    for _ in range(2):
        assert type(load(pipeline_class=Own)) is Own
    assert len(built) == 2
    assert converted() == []


def test_process_with_replaced_code_loads_by_that(load, monkeypatch, caplog):
    before = load().unet.conv_in.weight
    convert = single_file_utils.convert_ldm_unet_checkpoint

    def convert_otherwise(*args, **kwargs):
        return {name: -each for name, each in convert(*args, **kwargs).items()}

    for home in (single_file_utils, single_file_model):
        monkeypatch.setattr(home, "convert_ldm_unet_checkpoint", convert_otherwise)
        names = home.SINGLE_FILE_LOADABLE_CLASSES if home is single_file_model else {}
        for entry in names.values():
            if entry["checkpoint_mapping_fn"] is convert:
                monkeypatch.setitem(entry, "checkpoint_mapping_fn", convert_otherwise)
    with caplog.at_level("INFO", "shmload"):
        assert torch.equal(load().unet.conv_in.weight, -before)
    assert "convert_ldm_unet_checkpoint is the program's own" in caplog.text
    assert len(converted()) == 1


def test_weights_that_the_file_lacks_are_drawn_by_each(load, one_file, tmp_path):
    config, path = one_file("sdxl")
    tensors = load_file(path)
    del tensors["conditioner.embedders.1.model.text_projection"]
    save_file(tensors, tmp_path / "lacking.safetensors")
    for _ in range(2):
        shmload.load_pipeline(tmp_path / "lacking.safetensors", config=config, keep=True)
    assert converted() == []


# What stays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["path", "name", "part of the name"])
def test_file_goes_with_what_was_made_of_it(load, one_file, by, command):
    load()
    path = one_file("sdxl")[1]
    called = {"path": path, "name": path.name, "part of the name": "model.safe"}[by]
    _, printed, _ = command("rm", "--dry-run", "--json", called)
    assert len(json.loads(printed)["removed"]) == 2
    assert len(shmload.evict(called)) == 2
    assert shmload.segments() == []


def test_file_stays_while_what_was_made_of_it_is_used(load, one_file):
    pipe = load()
    with pytest.raises(shmload.SegmentBusy, match="converted-"):
        shmload.evict(one_file("sdxl")[1])
    assert len(shmload.segments()) == 2
    del pipe


def test_of_a_changed_file_another_one_is_made(one_file, tmp_path):
    config, path = one_file("sdxl")
    own = shutil.copy(path, tmp_path)
    before = shmload.load_pipeline(own, config=config, keep=True)
    tensors = load_file(path)
    save_file({name: each * 2 for name, each in tensors.items()}, own)
    after = shmload.load_pipeline(own, config=config, keep=True)
    weights = [each.text_encoder_2.text_projection.weight for each in (before, after)]
    assert torch.equal(weights[0] * 2, weights[1])
    outdated = [info.is_current for info in converted()]
    assert outdated == [False, True]
    del before, weights
    gc.collect()
    shmload.collect_garbage()
    assert [info.is_current for info in shmload.segments()] == [True, True]
    del after
