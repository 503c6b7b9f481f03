"""What is published is returned as it was, in any process, and costs what had changed."""

import functools

import diffusers
import pytest
import torch
from comparing import assert_equal, reference
from mappings import Mappings, copied_nbytes, state_of
from peft import LoraConfig
from pipelines import FAMILIES

import shmload

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

# The structure, with small tokenizers.
_STRUCTURE_NBYTES = 700_000


@pytest.fixture
def load(saved):
    """Load a pipeline whose weights are resident."""
    return lambda family="stable-diffusion": shmload.load_pipeline(
        saved(family), keep=True, progress=False
    )


def changed_nbytes(model, names):
    return sum(each.nbytes for key, each in model.state_dict().items() if names in key)


# Equality -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_unchanged_pipeline_is_returned_and_nothing_is_copied(saved, load, family):
    pipe = load(family)
    made = shmload.publish(pipe, "plain")
    assert made.source == "shm:plain@1"
    assert made.nbytes < _STRUCTURE_NBYTES
    got = shmload.load_pipeline("shm:plain", progress=False)
    assert_equal(got, reference(saved(family)))
    mappings = Mappings()
    for name, tensor in state_of(got).items():
        assert mappings.find(tensor)[1].startswith("/dev/shm/shmload-"), name
    assert copied_nbytes(got) == 0


def test_fused_lora_costs_what_it_has_changed(load):
    pipe = load()
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    pipe.unet.fuse_lora()
    pipe.unet.unload_lora()
    made = shmload.publish(pipe, "fused")
    changed = changed_nbytes(pipe.unet, "to_q.weight")
    assert changed <= made.nbytes < changed + _STRUCTURE_NBYTES
    assert_equal(shmload.load_pipeline(made.source), pipe)


CHANGES = {
    "two LoRAs": """
for name, scale in (("one", 2), ("two", 3)):
    config = LoraConfig(r=2, lora_alpha=scale, target_modules=["to_k"], init_lora_weights=False)
    pipe.unet.add_adapter(config, name)
pipe.unet.set_adapters(["one", "two"], [0.3, 0.7])
""",
    "a scheduler": """
import diffusers
pipe.scheduler = diffusers.EulerDiscreteScheduler.from_config(pipe.scheduler.config)
pipe.scheduler.set_timesteps(3)
""",
    "added tokens": """
pipe.tokenizer.add_tokens(["<watercolour>"])
pipe.text_encoder.resize_token_embeddings(len(pipe.tokenizer))
""",
    "another dtype": "pipe.vae.to(torch.float16)",
    "a layout": "pipe.unet.to(memory_format=torch.channels_last)",
    "tied": "pipe.unet.conv_out.weight = pipe.unet.conv_in.weight",
    "views of one memory": """
both = torch.arange(20.0)
pipe.unet.register_buffer("head", both[:12])
pipe.unet.register_buffer("tail", both[8:], persistent=False)
""",
    "a flag": "pipe.unet.requires_grad_(False); pipe.unet.train()",
    "none": "pipe.safety_checker = None",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("change", CHANGES)
def test_changed_pipeline_is_returned_as_it_is(load, change):
    pipe = load()
    exec(CHANGES[change], {"pipe": pipe, "torch": torch, "LoraConfig": LoraConfig})
    got = shmload.load_pipeline(shmload.publish(pipe, "changed").source)
    assert len(got.tokenizer) == len(pipe.tokenizer)
    modes = [[each.training for each in one.unet.modules()] for one in (got, pipe)]
    assert modes[0] == modes[1]
    for one in (got, pipe):
        one.unet.eval()
    assert_equal(got, pipe)
    if change == "tied":
        assert got.unet.conv_out.weight is got.unet.conv_in.weight
    if change == "views of one memory":
        got.unet.head[8] = 99
        assert got.unet.tail[0] == 99


# What cannot be kept ------------------------------------------------------------------------------


def _local():
    class Local(torch.nn.Linear):
        pass

    return Local(2, 2)


class _Lost:
    def __setstate__(self, state):
        raise ValueError("lost")

    def __getstate__(self):
        return {"some": "state"}


REFUSED = {
    "a class in a function": (_local, "Local"),
    "a part without bytes": (lambda: torch.nn.Linear(2, 2, device="meta"), "without bytes"),
    "a part that cannot be restored": (_Lost, "ValueError: lost"),
    "a tensor that was computed": (
        lambda: functools.partial(int, torch.ones(1, requires_grad=True) * 2),
        "computed with gradients",
    ),
}


@pytest.mark.parametrize("part", REFUSED)
def test_refused_part_is_named(load, part, shm_names):
    pipe = load()
    make, said = REFUSED[part]
    pipe.unet.extra = make()
    before = shm_names()
    with pytest.raises(shmload.PublicationError) as caught:
        shmload.publish(pipe, "refused")
    assert said in str(caught.value)
    # A part that cannot be restored shows only when all is put together again.
    if make is not _Lost:
        assert "unet.extra" in str(caught.value)
    assert shm_names() == before


def test_error_has_the_remedy_that_helps_here(load, saved):
    pipe = load()
    pipe.enable_model_cpu_offload(device="cpu")
    with pytest.raises(shmload.PublicationError, match="remove_all_hooks"):
        shmload.publish(pipe, "hooked")
    pipe.remove_all_hooks()
    shmload.publish(pipe, "hooked")
    pipe = shmload.load_pipeline(saved("flux"))
    pipe.transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(shmload.PublicationError, match=r"pipe\.transformer\.disable_cache\(\)"):
        shmload.publish(pipe, "cached")
    pipe.transformer.disable_cache()
    shmload.publish(pipe, "cached")


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 101, "shm:x@0"])
def test_name_that_is_none(name):
    with pytest.raises(shmload.ArgumentError):
        shmload.publish(torch.nn.Linear(2, 2), name)


def test_arguments_that_a_publication_does_not_take():
    shmload.publish(torch.nn.Linear(2, 2), "linear")
    with pytest.raises(shmload.ArgumentError, match="leave out dtype"):
        shmload.load_pipeline("shm:linear", dtype="bfloat16")
    with pytest.raises(shmload.ArgumentError, match="is a Linear, and no Conv2d"):
        shmload.load_model("Conv2d", "shm:linear")
    with pytest.raises(shmload.SegmentNotFound, match="there is no shm:linear@2"):
        shmload.load_pipeline("shm:linear@2")
    with pytest.raises(shmload.ArgumentError, match="leave it out"):
        shmload.publish(torch.nn.Linear(2, 2), "shm:linear@2")
