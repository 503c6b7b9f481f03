"""Models in the hub's cache are found by id; links to one blob have one segment."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from warming import NBYTES

import shmload

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
    hub_cache.add("org/name", folder, "b" * 40)
    report = shmload.warm("org/name", **where, revision="b" * 40)
    assert (report.read_nbytes, report.segments) == (0, names)
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


def test_model_that_is_half_in_the_cache_names_the_missing_file(hub_cache, folder):
    snapshot = hub_cache.add("org/name", folder)
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(shmload.ShardMissing, match="model-00002-of-00003"):
        shmload.warm("org/name", cache_dir=hub_cache.root)
    assert shmload.segments() == []
