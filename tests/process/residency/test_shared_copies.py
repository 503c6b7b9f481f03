"""Copies of a file share a segment where that is asked for, and only as long as they are equal."""

import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from warming import NBYTES, TENSORS, as_bf16, assert_same

import shmload
from shmload._checkpoints import contents


@pytest.fixture
def share_copies(configure, tmp_path):
    configure(share_copies=1, cache_dir=tmp_path / "cache")


@pytest.fixture
def copy(checkpoint, tmp_path):
    return shutil.copy(checkpoint, tmp_path / "copy.safetensors")


def test_copies_share_nothing_unless_asked(checkpoint, copy):
    assert shmload.warm(checkpoint).segments != shmload.warm(copy).segments


@pytest.mark.fast
@pytest.mark.usefixtures("share_copies")
def test_copies_share_a_segment_and_are_read_once(checkpoint, copy, hub_cache, monkeypatch):
    first = shmload.warm(checkpoint, dtype="bfloat16")
    second = shmload.warm(copy, dtype="bfloat16")
    assert (first.read_nbytes, second.read_nbytes) == (NBYTES, 0)
    assert first.segments == second.segments
    snapshot = hub_cache.add("org/name", checkpoint.parent)
    assert shmload.warm(snapshot, dtype="bfloat16").segments == first.segments
    (info,) = shmload.segments()
    assert (info.source, info.is_current) == (str(checkpoint), True)
    monkeypatch.setattr(contents, "_digest", pytest.fail)  # remembered
    assert_same(shmload.load_state_dict(copy, "bfloat16"), as_bf16(TENSORS))
    assert shmload.collect_garbage() == []


@pytest.mark.usefixtures("share_copies")
def test_each_copy_is_a_name_of_the_segment(checkpoint, tmp_path):
    copy = tmp_path / "pipeline" / "vae" / "model.safetensors"
    copy.parent.mkdir(parents=True)
    shutil.copy(checkpoint, copy)
    shmload.warm(checkpoint)
    with pytest.raises(shmload.SegmentNotFound):
        shmload.pin(copy)  # its digest is not known yet
    first = shmload.warm(copy).segments
    for path in (copy, copy.parent, copy.parent.parent):
        assert [info.name for info in shmload.pin(path)] == list(first)
    assert [info.name for info in shmload.evict(copy.parent.parent)] == list(first)


@pytest.mark.usefixtures("share_copies")
def test_copy_that_changes_has_its_own_segment(checkpoint, copy):
    before = shmload.warm(checkpoint).segments
    changed = {name: tensor + 1 for name, tensor in TENSORS.items()}
    save_file(changed, copy, {"format": "pt"})
    os.utime(copy, (0, 0))
    assert shmload.warm(copy).segments != before
    assert_same(shmload.load_state_dict(copy, keep=True), changed)
    assert_same(shmload.load_state_dict(checkpoint, keep=True), TENSORS)


@pytest.mark.usefixtures("share_copies")
def test_file_that_changes_while_it_is_read_is_known_by_itself(checkpoint, copy, monkeypatch):
    digest = contents._digest

    def read_and_touch(fd):
        found = digest(fd)
        os.utime(copy)
        return found

    first = shmload.warm(checkpoint).segments
    monkeypatch.setattr(contents, "_digest", read_and_touch)
    with pytest.raises(shmload.ShardChanged):
        shmload.warm(copy)
    monkeypatch.undo()
    assert [info.name for info in shmload.segments()] == list(first)


@pytest.mark.usefixtures("share_copies")
@pytest.mark.parametrize("rubbish", [b"", b"x" * 64, b"\xff" * 64])
def test_rubbish_in_the_memory_is_not_believed(checkpoint, copy, tmp_path, rubbish):
    first = shmload.warm(checkpoint).segments
    shmload.plan(copy, keep=True)
    for path in (tmp_path / "cache" / "contents").iterdir():
        path.write_bytes(rubbish)
    assert shmload.warm(copy).segments == first


@pytest.mark.usefixtures("share_copies")
def test_file_that_is_only_linked_is_not_read(checkpoint, monkeypatch):
    monkeypatch.setattr(contents, "_digest", pytest.fail)
    assert torch.equal(shmload.load_state_dict(checkpoint)["b"], TENSORS["b"])
