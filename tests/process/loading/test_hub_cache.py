"""Models in the hub's cache are found by id, and their files identified by sha256."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from warming import NBYTES

import shmload
from shmload.integrations import library

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


def test_files_of_the_hub_cache_are_known_by_their_sha256(hub_cache, folder):
    where = {"torch_dtype": torch.bfloat16, "cache_dir": hub_cache.root}
    first = hub_cache.add("org/name", folder)
    names = shmload.warm("org/name", **where).segments
    # Another repository and revision with the same content in new files.
    hub_cache.add("org/copy", folder, "b" * 40)
    assert shmload.warm("org/copy", **where).read_nbytes == 0
    assert shmload.warm("org/copy", **where).segments == names
    for blob in (first.parents[1] / "blobs").iterdir():
        os.utime(blob)
    assert shmload.warm("org/name", **where).read_nbytes == 0
    assert all(info.is_current for info in shmload.segments())


def test_only_a_hub_caches_blobs_are_known_by_their_names(tmp_path, checkpoint):
    # A sha256 as file name outside a hub cache proves nothing.
    path = tmp_path / "files" / ("a" * 64)
    path.parent.mkdir()
    shutil.copy(checkpoint, path)
    before = shmload.warm(path).segments
    os.utime(path)
    assert shmload.warm(path).segments != before


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


def test_download_is_of_the_wanted_revision(monkeypatch):
    asked = []

    def has_index(repo_id, name, **where):
        asked.append(where)
        return False

    def bring(repo_id, **where):
        asked.append(where)
        return "/snapshot"

    monkeypatch.setattr("huggingface_hub.file_exists", has_index)
    monkeypatch.setattr("huggingface_hub.snapshot_download", bring)
    where = {"revision": "other", "token": "secret"}
    assert library.download("org/name", variant="fp16", **where) == "/snapshot"
    assert asked == [where, where]
