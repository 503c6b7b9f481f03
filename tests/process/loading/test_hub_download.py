"""Models are decoded while they are downloaded from the hub, which a server here stands in for."""

import logging
import os
import shutil
import signal
import threading

import diffusers
import pytest
import torch
from comparing import assert_equal, assert_modules_equal, from_pretrained
from hub_server import HubServer, reset_sessions
from safetensors.torch import load_file, save_file

import shmload

pytestmark = pytest.mark.libraries

# Much more than decoding a tiny model takes, in seconds.
_DEADLINE_S = 20.0
_VAE = "vae/diffusion_pytorch_model.safetensors"
_UNET = "unet/diffusion_pytorch_model.safetensors"
_TEXT = "text_encoder/model.safetensors"
_CHECKER = "safety_checker/model.safetensors"


class Decoded(logging.Handler):
    """Knows what was decoded during a download, by the log."""

    def __init__(self):
        super().__init__()
        self._changed = threading.Condition()
        self.files = set()

    def emit(self, record):
        _, _, files = record.getMessage().partition("decoded while the rest is downloaded: ")
        with self._changed:
            self.files.update(files.split(", ") if files else ())
            self._changed.notify_all()

    def wait_for(self, *files):
        """Wait until some files were decoded; return whether they were."""
        with self._changed:
            return self._changed.wait_for(lambda: self.files.issuperset(files), _DEADLINE_S)


@pytest.fixture
def hub(monkeypatch):
    with HubServer() as server:
        with monkeypatch.context() as patch:
            server.install(patch)
            yield server
        reset_sessions()


@pytest.fixture
def decoded():
    handler = Decoded()
    logger = logging.getLogger("shmload._loading.ahead")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.setLevel(before)
    logger.removeHandler(handler)


@pytest.fixture
def hold(hub, decoded):
    """Hold a file back until others are decoded; then `then` goes wrong with it.

    Returns a list that gets, each time, whether they were decoded.
    """

    def hold_back(name, *others, then=lambda: ""):
        seen = []

        def trouble(asked):
            if asked != name:
                return ""
            seen.append(decoded.wait_for(*others))
            return then()

        hub.trouble = trouble
        return seen

    return hold_back


@pytest.fixture
def where(tmp_path):
    return {"cache_dir": tmp_path / "cache"}


# Decoding beside the download ---------------------------------------------------------------------


def test_pipeline_is_decoded_while_it_is_downloaded(hub, hold, saved, where, shm_names):
    hub.publish(saved("stable-diffusion"))
    seen = hold(_VAE, _UNET, _TEXT, _CHECKER)
    totals = set()
    pipe = shmload.load_pipeline(
        "org/name", dtype="bfloat16", progress=lambda done, total: totals.add(total), **where
    )
    assert seen == [True]
    assert shm_names() == []
    # What was decoded before is not decoded again; the VAE may have come in time, too.
    shards = {each.component: each.read_nbytes for each in shmload.plan("org/name", **where).shards}
    assert totals <= {shards["vae"]}
    wanted = from_pretrained(diffusers.StableDiffusionPipeline, "org/name", torch.bfloat16, **where)
    assert_equal(pipe, wanted)


def test_shards_are_decoded_one_by_one(hub, hold, saved, where, evicts, shm_names):
    source = saved("stable-diffusion", sharded=True)
    hub.publish(source)
    first, *_, last = sorted(path.name for path in source.glob("unet/*.safetensors"))
    names = []
    seen = hold(f"unet/{last}", f"unet/{first}", then=lambda: names.extend(shm_names()) or "")
    report = shmload.warm("org/name", dtype="bfloat16", **where)
    assert seen == [True]
    assert set(names) < set(report.segments)
    assert report.read_nbytes == sum(each.read_nbytes for each in shmload.plan(source).shards)
    assert shmload.warm("org/name", dtype="bfloat16", **where).read_nbytes == 0


def test_model_and_view_are_decoded_while_they_are_downloaded(hub, hold, copied, where, shm_names):
    source = copied("stable-diffusion", sharded=True)
    hub.publish(source)
    first, *_, last = sorted(path.name for path in source.glob("unet/*.safetensors"))
    seen = hold(f"unet/{last}", f"unet/{first}")
    unet = shmload.load_model(
        "UNet2DConditionModel", "org/name", subfolder="unet", dtype="bfloat16", **where
    )
    assert (seen, shm_names()) == ([True], [])
    wanted = from_pretrained(
        diffusers.UNet2DConditionModel, source, torch.bfloat16, subfolder="unet"
    ).state_dict()
    assert wanted.keys() == unet.state_dict().keys()
    assert all(torch.equal(each, wanted[name]) for name, each in unet.state_dict().items())
    shutil.rmtree(where["cache_dir"])
    with shmload.view("org/name", subfolder="unet", dtype="bfloat16", **where) as path:
        assert {each.dtype for each in load_file(path / last).values()} == {torch.bfloat16}
    assert seen == [True, True]


def test_service_decodes_what_is_downloaded(hub, hold, saved, where, service):
    service()
    hub.publish(saved("stable-diffusion"))
    seen = hold(_VAE, _UNET, _TEXT, _CHECKER)
    report = shmload.warm("org/name", dtype="bfloat16", **where)
    assert seen == [True]
    assert set(report.segments) == {info.name for info in shmload.segments()}


def test_files_that_the_load_does_not_read_are_not_decoded(hub, hold, copied, where, decoded):
    source = copied("stable-diffusion")
    weights = load_file(source / _UNET)
    for name in ("fp16.safetensors", "non_ema.safetensors", "bin"):
        save_file(weights, source / f"unet/diffusion_pytorch_model.{name}")
    hub.publish(source)
    # They are in the cache, as if another program had loaded them.
    hub_files = {"allow_patterns": ["unet/*.bin", "unet/*.fp16*", "unet/*.non_ema*"]}
    from huggingface_hub import snapshot_download

    snapshot_download("org/name", **hub_files, **where)
    seen = hold(_VAE, _TEXT, _CHECKER)
    shmload.load_pipeline("org/name", dtype="bfloat16", unet=None, **where)
    assert seen == [True]
    assert not any(name.startswith("unet") for name in decoded.files)
    shutil.rmtree(where["cache_dir"])
    snapshot_download("org/name", **hub_files, **where)
    seen = hold(_VAE, _UNET)
    with shmload.view("org/name", dtype="bfloat16", components=["unet", "vae"], **where):
        assert seen == [True]
    assert {name for name in decoded.files if name.startswith("unet")} == {_UNET}


# What users know of the hub -----------------------------------------------------------------------


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
    with pytest.raises(shmload.SourceNotFound, match=r"org/name.*no revision 'none'"):
        shmload.load_model("AutoencoderKL", "org/name", revision="none", **model)


def test_private_repository_needs_its_token(hub, saved, where, shm_names):
    hub.publish(saved("stable-diffusion"))
    hub.token = "hf_right"
    for token in (None, "hf_wrong"):
        with pytest.raises(shmload.SourceNotFound, match=r"private.*HF_TOKEN") as caught:
            shmload.load_pipeline("org/name", dtype="bfloat16", token=token, **where)
        assert "hf_" not in str(caught.value)
    shmload.load_pipeline("org/name", dtype="bfloat16", token="hf_right", **where)
    assert shm_names() == []


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


@pytest.mark.parametrize("keep", [False, True])
def test_download_that_fails_leaves_nothing_and_goes_on_later(
    hub, hold, saved, where, shm_names, evicts, keep
):
    hub.publish(saved("stable-diffusion"))
    names = []
    seen = hold(_VAE, _UNET, then=lambda: names.extend(shm_names()) or "403")
    arguments = {"dtype": "bfloat16", "keep": keep, **where}
    with pytest.raises(shmload.SourceNotFound, match=r"org/name.*cannot be downloaded"):
        shmload.load_pipeline("org/name", **arguments)
    assert seen[0]
    assert bool(names) == keep
    assert shm_names() == []
    del hub.asked[:]
    hub.trouble = lambda name: ""
    shmload.load_pipeline("org/name", **arguments)
    assert _VAE in hub.asked
    assert _UNET not in hub.asked


def test_file_whose_download_is_cut_is_equal(hub, saved, where):
    hub.publish(saved("stable-diffusion"))
    troubles = iter(["cut", ""])
    hub.trouble = lambda name: next(troubles) if name == _VAE else ""
    vae = {"subfolder": "vae", "dtype": "float32", **where}
    try:
        got = shmload.load_model("AutoencoderKL", "org/name", **vae)
    except shmload.SourceNotFound:  # huggingface_hub before version 1 asks for the rest only now
        got = shmload.load_model("AutoencoderKL", "org/name", **vae)
    assert [name for name in hub.asked if name.startswith(_VAE)] == [_VAE, f"{_VAE}+"]
    wanted = load_file(saved("stable-diffusion") / _VAE)
    assert all(torch.equal(each, wanted[name]) for name, each in got.state_dict().items())


def test_interrupt_during_a_download_leaves_nothing(hub, hold, saved, where, shm_names):
    hub.publish(saved("stable-diffusion"))
    seen = hold(_VAE, _UNET, then=lambda: os.kill(os.getpid(), signal.SIGINT) or "")
    with pytest.raises(KeyboardInterrupt):
        shmload.warm("org/name", dtype="bfloat16", **where)
    assert seen == [True]
    assert shm_names() == []


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
