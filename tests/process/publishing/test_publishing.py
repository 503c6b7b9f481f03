"""What is published is returned as it was, in any process, and costs what had changed."""

import copy
import functools

import diffusers
import pytest
import torch
from comparing import assert_equal, assert_modules_equal, reference
from halving import Halves
from mappings import Mappings, copied_nbytes, state_of
from peft import LoraConfig
from pipelines import FAMILIES
from torch.testing._internal.two_tensor import TwoTensor

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


@pytest.mark.slow
def test_another_process_gets_it_and_copies_nothing(load, new_child):
    pipe = load()
    with torch.no_grad():
        pipe.unet.conv_in.weight.add_(1)
    shmload.publish(pipe, "changed")
    child = new_child("""
import shmload
pipe = shmload.load_pipeline("shm:changed")
kinds = type(pipe).__name__, type(pipe.scheduler).__name__
print("IS", *kinds, pipe.tokenizer("a").input_ids, pipe.unet.conv_in.weight.tolist(), flush=True)
""")
    kinds = f"{type(pipe).__name__} {type(pipe.scheduler).__name__}"
    said = f"{kinds} {pipe.tokenizer('a').input_ids} {pipe.unet.conv_in.weight.tolist()}"
    assert child.expect("IS") == said


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


def test_compiled_model_is_published_as_its_original(load):
    pipe = load()
    original = pipe.unet
    pipe.unet = torch.compile(original, backend="eager")
    got = shmload.load_pipeline(shmload.publish(pipe, "compiled").source)
    assert_modules_equal(got.unet, original, "unet")


def test_tensors_that_a_tensor_is_made_of(load):
    unet = load().unet
    one = unet.time_embedding.linear_1
    values = one.weight.detach(), one.weight.detach() * 2
    one.weight = torch.nn.Parameter(TwoTensor(*values))
    made = shmload.publish(unet, "two")
    got = shmload.load_model("UNet2DConditionModel", made.source)
    weight = got.time_embedding.linear_1.weight
    assert type(weight) is TwoTensor
    assert isinstance(weight, torch.nn.Parameter)
    assert torch.equal(weight.a, values[0])
    assert torch.equal(weight.b, values[1])
    assert values[1].nbytes <= made.nbytes < values[1].nbytes + _STRUCTURE_NBYTES


def test_parameter_of_a_class_of_its_own(load):
    unet = load().unet
    unet.conv_in.weight = Halves(torch.arange(9, dtype=torch.uint8), scale=0.5)
    got = shmload.load_model(type(unet), shmload.publish(unet, "typed").source)
    weight = got.conv_in.weight
    assert (type(weight), weight.scale) == (Halves, 0.5)
    assert torch.equal(weight.as_subclass(torch.Tensor), torch.arange(9, dtype=torch.uint8))


def test_publication_of_a_publication(load):
    pipe = load()
    with torch.no_grad():
        pipe.unet.conv_in.weight.add_(1)
    first = shmload.publish(pipe, "first")
    pipe = shmload.load_pipeline(first.source)
    with torch.no_grad():
        pipe.unet.conv_out.weight.add_(1)
    second = shmload.publish(pipe, "second")
    assert len(second.needs) == len(first.needs) + 1
    assert_equal(shmload.load_pipeline("shm:second"), pipe)


def test_private_pipeline_is_copied_whole(saved):
    pipe = shmload.load_pipeline(saved("stable-diffusion"), progress=False)
    made = shmload.publish(pipe, "whole")
    weights = sum(each.nbytes for each in state_of(pipe).values())
    assert (made.needs, made.shared_nbytes) == ((), 0)
    assert weights <= made.nbytes < weights + _STRUCTURE_NBYTES
    assert_equal(shmload.load_pipeline(made.source), pipe)


def test_what_is_changed_afterwards_changes_neither(load):
    pipe = load()
    shmload.publish(pipe, "still")
    wanted = copy.deepcopy(pipe.unet)
    for each in (pipe, shmload.load_pipeline("shm:still")):
        with torch.no_grad():
            for parameter in each.unet.parameters():
                parameter.zero_()
    assert_modules_equal(shmload.load_pipeline("shm:still").unet, wanted, "unet")
    assert len(shmload.verify()) == len(shmload.segments())


# What cannot be kept ------------------------------------------------------------------------------


def _local():
    class Local(torch.nn.Linear):
        pass

    return Local(2, 2)


def _hooked():
    from accelerate import cpu_offload

    return cpu_offload(torch.nn.Linear(2, 2), execution_device="cpu")


class _Lost:
    def __setstate__(self, state):
        raise ValueError("lost")

    def __getstate__(self):
        return {"some": "state"}


REFUSED = {
    "a class in a function": (_local, "Local"),
    "a part without bytes": (lambda: torch.nn.Linear(2, 2, device="meta"), "without bytes"),
    "an offloading call's hooks": (_hooked, "unet.extra."),
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
