"""Versions of a publication: when they appear, what keeps them and what they need, and removal."""

import gc
import os
import shutil

import pytest
import torch

import shmload

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("evicts")]

# Over a component that `saved` has made.
BEGIN = """
import os, signal, sys, torch, shmload
model = shmload.load_model(
    "AutoencoderKL", sys.argv[1], subfolder="vae", keep=True, progress=False)
with torch.no_grad():
    model.encoder.conv_in.weight.add_(1)
"""


@pytest.fixture
def load(saved):
    """Load a model whose weights are resident."""
    return lambda: shmload.load_model(
        "AutoencoderKL", saved("stable-diffusion"), subfolder="vae", keep=True, progress=False
    )


def published():
    return [info.source for info in shmload.segments() if info.source.startswith("shm:")]


def test_each_time_it_is_another_version(load):
    model = load()
    for number in (1, 2, 3):
        with torch.no_grad():
            model.encoder.conv_in.weight.fill_(number)
        assert shmload.publish(model, "vae").version == number
    other = shmload.publish(model, "vae-2")
    assert (other.version, other.source) == (1, "shm:vae-2@1")
    for source, value in (("shm:vae", 3), ("shm:vae@1", 1), ("shm:vae@3", 3)):
        got = shmload.load_model("AutoencoderKL", source)
        assert (got.encoder.conv_in.weight == value).all()


# Where a publisher is killed: a function that it calls, and in which module.
MOMENTS = {
    "its part is begun": "keeping.made_room",
    "its part has a length": "keeping.write_at",
    "it is written": "keeping.digest_data",
    "it has a digest and no name": "part.shm_rename",
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_publisher_that_is_killed_leaves_nothing_to_be_found(saved, child, shm_names, load, moment):
    killed = child(
        f"""{BEGIN}
from shmload._building import keeping
from shmload._segments import part
{MOMENTS[moment]} = lambda *rest, **named: os.kill(os.getpid(), signal.SIGKILL)
shmload.publish(model, "vae")
""",
        saved("stable-diffusion"),
    )
    assert killed.wait() < 0, killed.errors
    assert published() == []
    assert [name for name in shm_names() if name.endswith(".part")]
    with pytest.raises(shmload.SegmentNotFound):
        shmload.load_model("AutoencoderKL", "shm:vae")
    if moment == "it is written":
        shmload.collect_garbage()
    else:  # the next publisher takes its part over
        assert shmload.publish(load(), "vae").version == 1
    assert not [name for name in shm_names() if name.endswith(".part")]


# What it needs ------------------------------------------------------------------------------------


def test_segment_that_is_needed_stays(load, saved):
    model = load()
    shmload.publish(model, "vae")
    del model
    gc.collect()
    source = saved("stable-diffusion")
    with pytest.raises(shmload.SegmentBusy, match="by the publication shm:vae@1; `shmload rm"):
        shmload.evict(source)
    (base,) = (info for info in shmload.segments() if info.source.startswith(str(source)))
    assert base.needed_by == ("shm:vae@1",)
    shmload.evict("shm:vae")
    shmload.evict(source)
    assert not shmload.segments()


def test_shared_segment_that_is_needed_becomes_resident(saved):
    model = shmload.load_model(
        "AutoencoderKL",
        saved("stable-diffusion", "bfloat16"),
        subfolder="vae",
        share=True,
        dtype="float32",
        progress=False,
    )
    made = shmload.publish(model, "vae")
    assert made.needs
    del model
    gc.collect()
    shmload.load_model("AutoencoderKL", "shm:vae")


@pytest.mark.parametrize("function", [shmload.plan, shmload.warm, shmload.share])
def test_functions_that_do_not_take_it_say_so(function):
    with pytest.raises(shmload.ArgumentError, match="shm:vae is a publication: load_pipeline and"):
        function("shm:vae")


@pytest.mark.slow
def test_segment_of_a_changed_file_stays_while_it_is_needed(copied, new_child):
    source = copied("stable-diffusion")
    builder = new_child(f"{BEGIN}print(shmload.publish(model, 'vae').source, flush=True)", source)
    builder.expect("shm:vae@1")
    assert builder.wait() == 0
    shutil.rmtree(source / "vae")
    assert shmload.collect_garbage() == []
    model = shmload.load_model("AutoencoderKL", "shm:vae")
    assert model.encoder.conv_in.weight.abs().sum() > 0
    del model
    gc.collect()
    assert len(shmload.evict("shm:vae")) == len(shmload.collect_garbage()) == 1


def test_publication_whose_segment_was_unlinked_is_broken(load):
    model = load()
    made = shmload.publish(model, "vae")
    os.unlink(f"/dev/shm/{made.needs[0]}")
    with pytest.raises(shmload.PublicationError, match=f"its segment {made.needs[0]} is gone"):
        shmload.load_model("AutoencoderKL", "shm:vae")


def test_other_versions_of_the_libraries_are_refused(load, monkeypatch):
    model = load()
    shmload.publish(model, "vae")
    monkeypatch.setattr("diffusers.__version__", "0.1")
    with pytest.raises(shmload.PublicationError, match=r"published with diffusers .*here is 0\.1"):
        shmload.load_model("AutoencoderKL", "shm:vae")
