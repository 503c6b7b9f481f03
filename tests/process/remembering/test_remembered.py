"""What one load has built is what the library builds, and all later loads get it."""

import gc
import json
import re
import shutil

import diffusers
import pytest
import torch
import transformers
from comparing import assert_equal, assert_modules_equal, reference
from mappings import copied_nbytes
from pipelines import FAMILIES
from remembering import BF16, change_scheduler, kept, load
from safetensors.torch import load_file, save_file

import shmload
from shmload._building import keeping, parts, remembered
from shmload._building.build import Build
from shmload._loading.trace import current

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts", "remembers")]

# What is recalled ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_later_loads_get_what_the_first_has_built(saved, built, family):
    source = saved(family)
    wanted = reference(source, BF16)
    for keep in (True, True, False):
        pipe = load(source, keep=keep)
        assert_equal(pipe, wanted)
        assert copied_nbytes(pipe) == 0
    assert len(built) == 1
    assert kept() == ["whole"]


@pytest.mark.parametrize("family", FAMILIES)
def test_where_not_all_can_be_kept_the_models_are(saved, family, monkeypatch):
    take_apart = keeping.take_apart

    def refuse(thing):
        if hasattr(thing, "scheduler"):
            raise parts.CannotKeep("scheduler: for no reason")
        return take_apart(thing)

    monkeypatch.setattr(keeping, "take_apart", refuse)
    source = saved(family)
    wanted = reference(source, BF16)
    for _ in range(2):
        pipe = load(source)
        assert_equal(pipe, wanted)
        assert copied_nbytes(pipe) == 0
    assert kept() == ["models: scheduler: for no reason"]


@pytest.mark.usefixtures("unfrozen")
def test_no_collection_falls_into_a_recall(saved):
    source = saved("stable-diffusion")
    load(source)
    ran = []

    def note(_phase, info):
        if current():  # in the call
            ran.append(info)

    gc.callbacks.append(note)
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        load(source)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(note)
    assert not ran


def test_listing_says_how_much_is_kept(saved, command):
    load(saved("stable-diffusion"))
    listed = command("ls", "--long")[1]
    assert re.search(r"keeps what was built: whole +/", listed)


def test_load_without_keep_keeps_nothing(saved, shm_names):
    pipe = load(saved("stable-diffusion"), keep=False)
    assert kept() == []
    del pipe
    assert shm_names() == []


def test_single_model_is_remembered(saved, built):
    source = saved("stable-diffusion") / "unet"
    wanted = diffusers.UNet2DConditionModel.from_pretrained(source)
    for _ in range(2):
        model = shmload.load_model(diffusers.UNet2DConditionModel, source, keep=True)
        assert_modules_equal(model, wanted, "unet")
    assert len(built) == 1


def test_what_a_program_does_to_one_changes_no_other(saved):
    source = saved("stable-diffusion")
    wanted = reference(source, BF16)
    first = load(source)
    for _ in range(2):
        pipe = load(source)
        assert_equal(pipe, wanted)
        for each in (first, pipe):
            each.tokenizer.add_tokens(["<new>"])
            each.scheduler.set_timesteps(3)
            each.unet.register_to_config(sample_size=999)
            each.unet.train()
            with torch.no_grad():
                each.unet.conv_in.weight.zero_()
    assert_equal(load(source), wanted)


def test_weight_that_was_written_to_while_it_was_built_is_copied(saved, monkeypatch):
    source = saved("stable-diffusion")
    make = remembered._keep

    def change(part, key, made, before):
        with torch.no_grad():
            made.unet.conv_in.bias.fill_(3)
        return make(part, key, made, before)

    monkeypatch.setattr(remembered, "_keep", change)
    load(source)
    assert load(source).unet.conv_in.bias.eq(3).all()
    bias = shmload.load_state_dict(source / "unet", "bfloat16")["conv_in.bias"]
    assert not bias.eq(3).any()


# What is not remembered ---------------------------------------------------------------------------


class Mine(diffusers.StableDiffusionPipeline):
    """A class of a script."""


@pytest.mark.parametrize(
    "given",
    [
        {"unet": "passed"},
        {"device_map": "cpu"},
        {"verify": True},
        {"trust_remote_code": True},
        {"keep": "converted"},
    ],
    ids=str,
)
def test_call_that_may_mean_more_is_built_each_time(saved, built, given):
    source = saved("stable-diffusion")
    if "unet" in given:
        unet = diffusers.UNet2DConditionModel.from_pretrained(source / "unet", torch_dtype=BF16)
        given = {"unet": unet}
    for _ in range(2):
        load(source, **given)
    assert (len(built), kept()) == (2, [])


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, lambda: torch.device("cpu")], ids=["inference", "device"]
)
def test_in_a_mode_it_is_built_each_time(saved, built, mode):
    with mode():
        for _ in range(2):
            load(saved("stable-diffusion"))
    assert (len(built), kept()) == (2, [])


@pytest.mark.parametrize("kind", [Mine, f"{Mine.__module__}.{Mine.__name__}"])
def test_class_outside_of_the_libraries_is_built_each_time(saved, built, kind):
    source = saved("stable-diffusion")
    for _ in range(2):
        assert type(load(source, pipeline_class=kind)).__name__ == "Mine"
    assert (len(built), kept()) == (2, [])


def test_adapter_is_built_each_time(saved, tmp_path):
    source = saved("stable-diffusion") / "unet"
    adapted = tmp_path / "unet"
    shutil.copytree(source, adapted)
    (adapted / "adapter_config.json").write_text("{}")
    for path, count in ((source, 1), (adapted, 1)):
        shmload.load_model("UNet2DConditionModel", path, keep=True)
        assert len(kept()) == count


_REFUSES_FP8 = pytest.mark.skipif(transformers.__version__ < "5", reason="needs a GPU for fp8")


@pytest.mark.parametrize("method", ["mxfp4", pytest.param("fp8", marks=_REFUSES_FP8)])
def test_weights_that_become_floats_without_a_gpu_are_built_each_time(copied, built, method):
    source = copied("stable-diffusion")
    file = source / "text_encoder" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    for _ in range(2):
        load(source)
    assert (len(built), kept()) == (2, [])


def test_pipeline_that_takes_a_prior_from_elsewhere_is_built_each_time(saved, built, monkeypatch):
    source = saved("stable-diffusion")
    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "_load_connected_pipes", True)
    for _ in range(2):
        load(source)
    assert len(built) == 2
    assert kept() == ["nothing: the library loads its prior from another repository"]


def test_source_that_changes_while_it_is_built_is_not_kept(copied, monkeypatch):
    source = copied("stable-diffusion")
    build = Build.run

    def change(self):
        change_scheduler(source, monkeypatch)
        return build(self)

    monkeypatch.setattr(Build, "run", change)
    load(source)
    assert kept() == []


def test_load_within_a_load_of_the_same_does_not_wait(saved, monkeypatch):
    source = saved("stable-diffusion")
    build, within = Build.run, []

    def load_too(self):
        if not within:
            within.append(None)
            within[:] = [load(source)]
        return build(self)

    monkeypatch.setattr(Build, "run", load_too)
    assert_equal(load(source), within.pop())
    assert kept() == ["whole"]


def test_weights_that_are_drawn_at_random_are_drawn_each_time(copied, built):
    source = copied("stable-diffusion")
    file = source / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    name = next(key for key in tensors if key.endswith("token_embedding.weight"))
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    made = [load(source).text_encoder.get_input_embeddings().weight for _ in range(2)]
    assert not torch.equal(*made)
    assert len(built) == 2
    assert kept() == ["nothing: the library draws some of its weights at random"]
