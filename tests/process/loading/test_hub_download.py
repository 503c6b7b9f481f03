"""Models are downloaded from the hub, which a server here stands in for."""

import gc
import os
import signal

import diffusers
import pytest
import torch
from comparing import assert_equal, assert_modules_equal, from_pretrained
from hub_server import HubServer, reset_sessions
from safetensors.torch import load_file, save_file
from traces import mentions_of_view

import shmload

pytestmark = pytest.mark.libraries

_VAE = "vae/diffusion_pytorch_model.safetensors"
_UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def hub(monkeypatch):
    with HubServer() as server:
        with monkeypatch.context() as patch:
            server.install(patch)
            yield server
        reset_sessions()


@pytest.fixture
def where(tmp_path):
    return {"cache_dir": tmp_path / "cache"}


# What users know of the hub -----------------------------------------------------------------------


def test_pipeline_is_downloaded_and_decoded(hub, saved, where, shm_names):
    hub.publish(saved("stable-diffusion", sharded=True))
    pipe = shmload.load_pipeline("org/name", dtype="bfloat16", **where)
    assert shm_names() == []
    wanted = from_pretrained(diffusers.StableDiffusionPipeline, "org/name", torch.bfloat16, **where)
    assert_equal(pipe, wanted)
    assert not mentions_of_view(pipe)
    with shmload.view("org/name", subfolder="vae", dtype="bfloat16", **where) as path:
        tensors = [each for file in path.glob("*.safetensors") for each in load_file(file).values()]
        assert {each.dtype for each in tensors} == {torch.bfloat16}


def test_revision_is_the_one_that_was_asked_for(hub, saved, copied, where):
    first = hub.publish(saved("stable-diffusion"))
    source = copied("stable-diffusion")
    weights = load_file(source / _VAE)
    save_file({name: each + 1 for name, each in weights.items()}, source / _VAE)
    hub.publish(source, "next")
    model = {"subfolder": "vae", "dtype": "float32", **where}
    for revision, shift in (("next", 1), (first, 0), (None, 0)):
        vae = shmload.load_model("AutoencoderKL", "org/name", revision=revision, **model)
        name, value = next(iter(vae.state_dict().items()))
        assert torch.equal(value, weights[name] + shift)
    with pytest.raises(shmload.SourceNotFound, match=r"org/name.*Revision Not Found"):
        shmload.load_model("AutoencoderKL", "org/name", revision="none", **model)


def test_private_repository_needs_its_token(hub, saved, where, shm_names):
    hub.publish(saved("stable-diffusion"))
    hub.token = "hf_right"
    for token in (None, "hf_wrong"):
        with pytest.raises(shmload.SourceNotFound, match="private or gated") as caught:
            shmload.load_pipeline("org/name", dtype="bfloat16", token=token, **where)
        assert "hf_" not in str(caught.value)
    shmload.load_pipeline("org/name", dtype="bfloat16", token="hf_right", **where)
    assert shm_names() == []


@pytest.mark.slow
def test_nothing_is_asked_for_what_is_cached(hub, saved, where):
    hub.publish(saved("stable-diffusion"))
    offline = {"dtype": "bfloat16", "local_files_only": True, **where}
    with pytest.raises(shmload.SourceNotFound, match="downloads are off"):
        shmload.load_pipeline("org/name", **offline)
    assert hub.requests == 0
    shmload.load_pipeline("org/name", dtype="bfloat16", **where)
    requests = hub.requests
    shmload.load_pipeline("org/name", **offline)
    shmload.load_pipeline("org/name", dtype="bfloat16", **where)
    assert hub.requests == requests


# Downloads that fail ------------------------------------------------------------------------------


def test_download_that_fails_leaves_nothing_and_goes_on_later(hub, saved, where, shm_names):
    hub.publish(saved("stable-diffusion"))
    hub.trouble = lambda name: "403" if name == _VAE else ""
    with pytest.raises(shmload.SourceNotFound, match=r"org/name.*cannot be downloaded"):
        shmload.load_pipeline("org/name", dtype="bfloat16", **where)
    assert shm_names() == []
    (snapshot,) = where["cache_dir"].glob("models--*/snapshots/*")
    there = {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}
    assert "model_index.json" in there
    del hub.asked[:]
    hub.trouble = lambda name: ""
    shmload.load_pipeline("org/name", dtype="bfloat16", **where)
    assert _VAE in hub.asked
    assert there.isdisjoint(hub.asked)


def test_interrupt_during_a_download_leaves_nothing(hub, saved, where, shm_names):
    hub.publish(saved("stable-diffusion"))
    interrupts = iter([lambda: os.kill(os.getpid(), signal.SIGINT)])
    hub.trouble = lambda name: next(interrupts, str)() or "" if name == _VAE else ""
    with pytest.raises(KeyboardInterrupt):
        shmload.warm("org/name", dtype="bfloat16", **where)
    assert shm_names() == []


def test_a_download_leaves_the_garbage_collector_on(hub, saved, where):
    source = saved("stable-diffusion")
    hub.publish(source)
    states = set()
    hub.trouble = lambda name: states.add(gc.isenabled()) or ""
    shmload.load_pipeline("org/name", **where)
    shmload.load_model("AutoencoderKL", "org/name", subfolder="vae", force_download=True, **where)
    url, config = f"https://huggingface.co/org/name/blob/main/{_VAE}", str(source / "vae")
    shmload.load_model("AutoencoderKL", url, config=config, cache_dir=where["cache_dir"] / "url")
    assert states == {True}


# Files by their URL -------------------------------------------------------------------------------


def test_url_of_a_file_is_that_file_in_the_cache(hub, saved, where, evicts):
    source = saved("stable-diffusion")
    hub.publish(source)
    page = "https://huggingface.co/org/name/blob/main"
    config = str(source / "vae")
    got = shmload.load_model(
        "AutoencoderKL", f"{page}/{_VAE}", config=config, dtype="bfloat16", keep=True, **where
    )
    wanted = diffusers.AutoencoderKL.from_single_file(
        str(source / _VAE), config=config, torch_dtype=torch.bfloat16
    )
    assert_modules_equal(got, wanted, "vae")
    content = f"https://huggingface.co/org/name/resolve/main/{_UNET}?download=true"
    found = shmload.load_state_dict(content, **where)
    for name, tensor in load_file(source / _UNET).items():
        assert torch.equal(found[name], tensor)
    with pytest.raises(shmload.SourceNotFound, match=r"org/name/no\.safetensors"):
        shmload.load_state_dict(f"{page}/no.safetensors", **where)
    with pytest.raises(shmload.ArgumentError, match="give the hub id, such as org/name"):
        shmload.load_pipeline("https://huggingface.co/org/name/tree/main", **where)
