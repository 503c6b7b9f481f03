"""Models in the hub's cache are found by id; links to one blob have one segment."""

import shutil
from pathlib import Path

import pytest
import torch
from hub_caches import Hub
from safetensors.torch import load
from warming import NBYTES

import shmload
from shmload._checkpoints.hub import find_model, find_source
from shmload._checkpoints.wanted import Hub as Place
from shmload._checkpoints.wanted import Wanted

pytestmark = pytest.mark.libraries


def test_model_is_found_in_the_hub_cache_by_id(hub_cache, folder):
    snapshot = hub_cache.add("org/name", folder)
    where = {"torch_dtype": torch.bfloat16, "cache_dir": hub_cache.root}
    report = shmload.warm("org/name", **where)
    assert report.read_nbytes == NBYTES
    assert {Path(info.source).parent for info in shmload.segments()} == {snapshot}
    assert shmload.warm("org/name", **where, revision="main").read_nbytes == 0
    assert shmload.warm("org/name", **where, revision="a" * 40).read_nbytes == 0
    assert shmload.warm(snapshot, torch_dtype=torch.bfloat16).read_nbytes == 0
    with shmload.view("org/name", **where) as path:
        assert (path / "config.json").read_text() == "{}"
    assert len(shmload.evict(snapshot)) == 3


def test_snapshots_with_links_to_one_blob_share_segments(hub_cache, folder):
    where = {"torch_dtype": torch.bfloat16, "cache_dir": hub_cache.root}
    hub_cache.add("org/name", folder)
    names = shmload.warm("org/name", **where).segments
    second = hub_cache.add("org/name", folder, "b" * 40)
    report = shmload.warm("org/name", **where, revision="b" * 40)
    assert (report.read_nbytes, report.segments) == (0, names)
    assert {info.name for info in shmload.pin(second)} == set(names)
    shmload.unpin(second)
    # The same content as another file.
    hub_cache.add("org/copy", folder)
    assert shmload.warm("org/copy", **where).read_nbytes == NBYTES
    assert all(info.is_current for info in shmload.segments())


def _replace(blob, content):
    """As a download does."""
    blob.with_suffix(".incomplete").write_bytes(content)
    blob.with_suffix(".incomplete").rename(blob)


@pytest.mark.parametrize("mend", [_replace, Path.write_bytes])
def test_blob_that_was_damaged_is_decoded_again_once_it_is_whole(hub_cache, saved, evicts, mend):
    snapshot = hub_cache.add("org/name", saved("stable-diffusion"))
    blob = (snapshot / "vae/diffusion_pytorch_model.safetensors").resolve()
    whole = blob.read_bytes()
    wanted = load(whole)
    blob.write_bytes(whole[:-64] + b"\1" * 64)

    def is_right():
        where = {"subfolder": "vae", "cache_dir": hub_cache.root}
        vae = shmload.load_model("AutoencoderKL", "org/name", keep=True, verify=True, **where)
        got = vae.state_dict()
        return got.keys() == wanted.keys() and all(got[n].equal(wanted[n]) for n in wanted)

    assert not is_right()
    handle = shmload.Handle.of("org/name", cache_dir=hub_cache.root)
    mend(blob, whole)
    assert is_right()
    assert [info.is_current for info in shmload.segments()].count(False) == 1
    # Handles and folders of results know the blob by its sha256, on each host.
    assert shmload.Handle.of("org/name", cache_dir=hub_cache.root) == handle


def test_model_that_is_not_in_the_cache_is_not_found(hub_cache, folder):
    with pytest.raises(shmload.SourceNotFound, match=r"org/nothing.*HF_HUB_OFFLINE"):
        shmload.warm("org/nothing", cache_dir=hub_cache.root)
    with pytest.raises(shmload.SourceNotFound, match=r"org/nothing.*local_files_only"):
        shmload.warm("org/nothing", cache_dir=hub_cache.root, local_files_only=True)
    hub_cache.add("org/name", folder)
    with pytest.raises(shmload.SourceNotFound, match="org/name"):
        shmload.warm("org/name", cache_dir=hub_cache.root, revision="other")


def test_what_is_in_the_cache_instead_is_said(hub_cache, folder):
    hub_cache.add("org/name", folder)
    where = {"cache_dir": hub_cache.root, "local_files_only": True}
    with pytest.raises(shmload.SourceNotFound) as caught:
        shmload.warm("org/name", **where, revision="nope")
    said = f"not in the hub cache in revision 'nope' (there: main, {'a' * 40}), and downloads are "
    assert said in str(caught.value)
    with pytest.raises(shmload.SourceNotFound) as caught:
        shmload.warm("org/nane", **where)
    assert f"not in the hub cache ({hub_cache.root}), and" in str(caught.value)
    assert str(caught.value).endswith("; did you mean 'org/name'?")


def test_model_that_is_half_in_the_cache_names_the_missing_file(hub_cache, folder):
    snapshot = hub_cache.add("org/name", folder)
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(shmload.ShardMissing, match="model-00002-of-00003"):
        shmload.warm("org/name", cache_dir=hub_cache.root)
    assert shmload.segments() == []


# Downloads ----------------------------------------------------------------------------------------


@pytest.fixture
def hub(hub_cache, saved, tmp_path, monkeypatch):
    """A pipeline on the hub, whose UNet has weights in every format and a variant."""
    source = tmp_path / "repository"
    shutil.copytree(saved("stable-diffusion"), source)
    for name in (
        "diffusion_pytorch_model.fp16.safetensors",
        "diffusion_pytorch_model.bin",
        "diffusion_flax_model.msgpack",
        "more/diffusion_pytorch_model.safetensors",
    ):
        (source / "unet" / name).parent.mkdir(exist_ok=True)
        (source / "unet" / name).write_bytes(b"")
    hub = Hub(hub_cache, "org/name", source)
    hub.install(monkeypatch)
    return hub


_UNET = ["model_index.json", "unet/config.json"]


@pytest.mark.parametrize(
    ("kwargs", "weights"),
    [
        ({}, "diffusion_pytorch_model.safetensors"),
        ({"use_safetensors": True}, "diffusion_pytorch_model.safetensors"),
        ({"use_safetensors": False}, "diffusion_pytorch_model.bin"),
        ({"variant": "fp16"}, "diffusion_pytorch_model.fp16.safetensors"),
    ],
)
def test_download_of_one_model_leaves_the_rest_of_the_pipeline(hub, hub_cache, kwargs, weights):
    wanted = Wanted.parse(
        "org/name",
        None,
        None,
        kwargs.get("variant"),
        {"subfolder": "unet", "cache_dir": hub_cache.root, "revision": "main", "token": "secret"},
        function=shmload.load_model,
    )
    find_model(wanted, kwargs)
    assert hub.downloads == [[*_UNET, f"unet/{weights}"]]
    assert (hub.asked[0]["revision"], hub.asked[0]["token"]) == ("main", "secret")


def test_model_that_is_not_cached_is_downloaded_once(hub, hub_cache, evicts):
    where = {"cache_dir": str(hub_cache.root), "subfolder": "unet"}
    for _ in range(2):
        got = shmload.load_model("UNet2DConditionModel", "org/name", **where)
        assert got.config._name_or_path == "org/name"
    shmload.warm("org/name", **where)
    assert len(hub.downloads) == 1


def test_one_component_is_warmed_without_the_pipeline(hub, hub_cache, evicts):
    shmload.warm("org/name", cache_dir=hub_cache.root, subfolder="vae")
    weights = "diffusion_pytorch_model.safetensors"
    assert hub.downloads == [["model_index.json", "vae/config.json", f"vae/{weights}"]]


def test_download_of_a_pipeline_knows_the_arguments_of_the_load(hub, hub_cache):
    unet = object()
    given = {"trust_remote_code": True, "use_safetensors": True, "custom_pipeline": "own"}
    wanted = Wanted(source="org/name", variant="fp16", hub=Place(cache_dir=hub_cache.root))
    find_source(wanted, {**given, "unet": unet})
    expected = given | {"unet": unet, "variant": "fp16", "cache_dir": hub_cache.root}
    assert expected.items() <= hub.asked[0].items()
    assert hub.downloads[0] != _UNET


def test_weights_cached_in_another_format_are_downloaded(hub, hub_cache):
    pickled = [name for name in hub._list("org/name") if not name.endswith(".safetensors")]
    hub_cache.add("org/name", hub._source, only=pickled)
    wanted = Wanted(source="org/name", hub=Place(cache_dir=hub_cache.root, subfolder="unet"))
    find_model(wanted, {"use_safetensors": False})
    assert not hub.downloads
    find_model(wanted, {"use_safetensors": True})
    assert hub.downloads == [[*_UNET, "unet/diffusion_pytorch_model.safetensors"]]
    find_model(wanted, {"use_safetensors": True})
    assert len(hub.downloads) == 1


def test_pipeline_cached_in_another_format_is_downloaded(hub, hub_cache):
    hub_cache.add("org/name", hub._source)
    wanted = Wanted(source="org/name", hub=Place(cache_dir=hub_cache.root))
    find_source(wanted, {"use_safetensors": True})
    assert not hub.downloads
    find_source(wanted, {"use_safetensors": False})
    assert len(hub.downloads) == 1
