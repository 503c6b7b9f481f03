"""A pipeline gets the weights of another version in place: all of them, or none."""

import pytest
import torch
from comparing import assert_equal, reference
from halving import Halves
from mappings import copied_nbytes, state_of
from peft import LoraConfig
from pipelines import build, run

import shmload

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]


@pytest.fixture
def trained(saved):
    """Return a resident pipeline, and a function that changes a part of it and publishes it."""

    def load():
        pipe = shmload.load_pipeline(saved("stable-diffusion"), keep=True, progress=False)

        def publish():
            with torch.no_grad():
                pipe.unet.conv_in.weight.add_(1)
            return shmload.publish(pipe, "trained")

        return pipe, publish

    return load


def test_pipeline_gets_the_new_weights_and_keeps_its_objects(trained):
    pipe, publish = trained()
    reader = publish().load()
    before = dict(reader.unet.named_parameters())
    made = publish()
    assert shmload.newest("shm:trained") == made.source == "shm:trained@2"
    done = shmload.update(reader, made)
    assert done.source == "shm:trained@2"
    assert_equal(reader, pipe)
    assert dict(reader.unet.named_parameters()) == before
    assert copied_nbytes(reader) == 0
    assert (run(reader) == run(made.load())).all()


def test_model_is_updated_too_with_its_buffers():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).eval()
    model[0].weight = Halves(torch.ones(8, 8, dtype=torch.int8), 0.5)
    reader = shmload.publish(model, "halves").load()
    with torch.no_grad():
        model[0].weight.add_(1)
        model[1].running_mean.add_(1)
    shmload.update(reader, shmload.publish(model, "halves"))
    assert torch.equal(reader[0].weight, model[0].weight)
    assert torch.equal(reader[1].running_mean, model[1].running_mean)
    model[0].weight.scale = 0.25
    with pytest.raises(shmload.PublicationError, match="scale"):
        shmload.update(reader, shmload.publish(model, "halves"))


# What gives weights their meaning -----------------------------------------------------------------


def add_adapter(pipe, name="a", **given):
    torch.manual_seed(0)
    config = {"r": 2, "target_modules": ["to_q"], "init_lora_weights": False} | given
    pipe.unet.add_adapter(LoraConfig(**config), name)
    pipe.unet.eval()


@pytest.mark.parametrize(
    "change",
    [
        lambda pipe: add_adapter(pipe, lora_alpha=64),
        lambda pipe: (add_adapter(pipe), pipe.set_adapters("a", 3.0)),
        lambda pipe: (add_adapter(pipe), pipe.fuse_lora(lora_scale=3.0)),
    ],
    ids=["alpha", "weight", "fused"],
)
def test_state_of_adapters_is_set_with_the_weights(saved, change):
    plain, changed = (reference(saved("stable-diffusion")) for _ in range(2))
    add_adapter(plain)
    change(changed)
    images = [run(plain), run(changed)]
    assert not (images[0] == images[1]).all()
    versions = [shmload.publish(each, "adapted") for each in (plain, changed)]
    reader = versions[0].load()
    for number in (1, 0):
        shmload.update(reader, versions[number])
        assert (run(reader) == images[number]).all()
        fresh = versions[number].load()
        assert reader.num_fused_loras == fresh.num_fused_loras
        for pipe in (reader, fresh) if fresh.num_fused_loras else ():
            pipe.unfuse_lora()
        assert (run(reader) == run(fresh)).all()


def change_heads(pipe):
    unet = pipe.unet
    unet.register_to_config(attention_head_dim=unet.config.attention_head_dim * 2)


def test_other_configuration_of_equal_shapes_is_refused(saved, tmp_path):
    said = r"unet\.config\.attention_head_dim is 4 here, and 8 there"
    reader = shmload.load_pipeline(saved("stable-diffusion"))
    before = {name: each.clone() for name, each in state_of(reader).items()}
    other = build("stable-diffusion", seed=7)
    change_heads(other)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(shmload.PublicationError, match=said):
        shmload.update(reader, tmp_path / "other")
    with pytest.raises(shmload.PublicationError, match=said):
        shmload.update(reader, shmload.publish(other, "other"))
    after = state_of(reader)
    assert all(torch.equal(after[name], each) for name, each in before.items())


# Nothing, if it cannot be all ---------------------------------------------------------------------


def widen(pipe):
    pipe.unet.conv_out = torch.nn.Conv2d(8, 5, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (add_adapter, "unet.down_blocks"),
        (widen, "unet.conv_out"),
        (lambda pipe: pipe.text_encoder.half(), "text_encoder"),
        (lambda pipe: setattr(pipe, "vae", None), "vae is only there"),
        (lambda pipe: pipe.vae.to("meta"), "vae"),
    ],
)
def test_other_structure_is_refused_and_nothing_changes(trained, change, said):
    pipe, publish = trained()
    reader = publish().load()
    change(reader)
    before = {name: each.clone() for name, each in state_of(reader).items() if not each.is_meta}
    with torch.no_grad():
        pipe.text_encoder.get_input_embeddings().weight.add_(1)
    with pytest.raises(shmload.PublicationError, match=said):
        shmload.update(reader, publish())
    after = state_of(reader)
    assert all(torch.equal(after[name], each) for name, each in before.items())


def test_tied_weights_stay_tied_or_are_refused(trained):
    pipe, publish = trained()
    blocks = pipe.unet.down_blocks[0].resnets[0], pipe.unet.down_blocks[0].resnets[0]
    blocks[0].norm2.weight = blocks[0].norm1.weight
    reader = publish().load()
    tied = reader.unet.down_blocks[0].resnets[0]
    assert tied.norm1.weight is tied.norm2.weight
    with torch.no_grad():
        blocks[0].norm1.weight.add_(1)
    shmload.update(reader, publish())
    assert tied.norm1.weight is tied.norm2.weight
    assert_equal(reader, pipe)
    blocks[0].norm2.weight = torch.nn.Parameter(blocks[0].norm1.weight.detach() + 1)
    with pytest.raises(shmload.PublicationError, match="tied"):
        shmload.update(reader, publish())


def test_unknown_source_changes_nothing(trained):
    pipe, _ = trained()
    with pytest.raises(shmload.SegmentNotFound):
        shmload.update(pipe, "shm:nothing")
    with pytest.raises(shmload.SourceNotFound):
        shmload.update(pipe.unet, "some/path")
    with pytest.raises(shmload.ArgumentError, match="leave out dtype"):
        shmload.update(pipe, shmload.publish(pipe, "half"), dtype="float16")


# Several processes --------------------------------------------------------------------------------


def test_version_that_is_removed_stays_with_who_has_it(trained):
    _, publish = trained()
    reader = publish().load()
    wanted = {name: each.clone() for name, each in state_of(reader).items()}
    for _ in range(2):  # the trainer does not wait for readers
        publish()
    with pytest.raises(shmload.SegmentBusy):
        shmload.evict("shm:trained@1")
    assert all(torch.equal(each, wanted[name]) for name, each in state_of(reader).items())
    done = shmload.update(reader, "shm:trained")
    assert done.source == "shm:trained@3"
    shmload.evict("shm:trained@1")
    with pytest.raises(shmload.SegmentBusy):
        shmload.evict("shm:trained@3")
    with pytest.raises(shmload.SegmentNotFound):
        shmload.update(reader, "shm:trained@1")


@pytest.mark.slow
def test_reader_that_is_killed_in_the_middle_harms_nobody(trained, new_child):
    pipe, publish = trained()
    made = publish()
    child = new_child("""
import sys, torch, shmload
from shmload.integrations import updating
pipe = shmload.load_pipeline("shm:trained")
adopt = updating.adopt
def stop(*models):
    print("HALF", flush=True)
    sys.stdin.read()
updating.adopt = stop
print("READY", flush=True)
sys.stdin.readline()
shmload.update(pipe, "shm:trained")
""")
    child.expect("READY")
    newer = publish()
    child.say()
    child.expect("HALF")
    child.process.kill()
    child.wait()
    assert_equal(newer.load(), pipe)
    shmload.verify("shm:trained")
    shmload.evict(made.source)
