"""A view is a private directory in the library's layout, removed at the end of its block."""

import json
import os
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from warming import TENSORS, as_bf16, assert_same

import shmload


@pytest.mark.parametrize("keep", [False, True])
def test_view_of_a_file_is_a_file_of_that_name(checkpoint, shm_names, keep):
    with shmload.view(checkpoint, torch_dtype=torch.bfloat16, keep=keep) as path:
        assert path.name == checkpoint.name
        assert "." not in str(path.parent)  # some libraries split whole paths at dots
        found = load_file(path)
    assert not path.exists()
    assert_same(found, as_bf16(TENSORS))  # still mapped
    assert len(shm_names()) == keep
    assert len(shmload.segments()) == keep


def test_view_of_a_directory_has_all_that_is_in_it(folder):
    (folder / "extra" / "deep").mkdir(parents=True)
    (folder / "extra" / "deep" / "notes.txt").write_text("notes")
    (folder / "dangling").symlink_to("nowhere")
    with shmload.view(folder, torch_dtype=torch.bfloat16) as path:
        assert sorted(os.listdir(path)) == sorted(os.listdir(folder))
        assert (path / "extra" / "deep" / "notes.txt").read_text() == "notes"
        assert (path / "config.json").samefile(folder / "config.json")
        found = {}
        for shard in path.glob("*.safetensors"):
            found |= load_file(shard)
        # Private: no other user may list it.
        assert path.stat().st_mode & 0o777 == 0o700
    assert_same(found, as_bf16(TENSORS))
    assert not path.exists()
    assert (folder / "extra" / "deep" / "notes.txt").exists()  # removing a view removes links only


def test_view_is_removed_whatever_happens_in_it(checkpoint, shm_names):
    with (
        pytest.raises(RuntimeError, match="mine"),
        shmload.view(checkpoint, torch_dtype=torch.bfloat16),
    ):
        raise RuntimeError("mine")
    assert shm_names() == []


def test_files_that_a_library_writes_to_a_view_go_with_it(folder, shm_names):
    with shmload.view(folder, torch_dtype=torch.bfloat16) as path:
        (path / "cache").mkdir()
        (path / "cache" / "model.lock").touch()
    assert shm_names() == []
    assert not (folder / "cache").exists()


def test_views_of_one_source_do_not_disturb_each_other(checkpoint):
    with shmload.view(checkpoint, torch_dtype=torch.bfloat16, keep=True) as first:
        with shmload.view(checkpoint, torch_dtype=torch.bfloat16) as second:
            assert first != second
        assert_same(load_file(first), as_bf16(TENSORS))
        assert [info.is_leased for info in shmload.segments()] == [True]
        with pytest.raises(shmload.SegmentBusy):
            shmload.evict(checkpoint)
    assert [info.is_leased for info in shmload.segments()] == [False]


def test_view_of_a_pipeline_replaces_the_weights_of_some_components(tmp_path, evicts):
    source = tmp_path / "pipeline"
    index = {"_class_name": "P"}
    for name in ("unet", "vae"):
        (source / name).mkdir(parents=True)
        save_file(TENSORS, source / name / "diffusion_pytorch_model.safetensors")
        index[name] = ["nowhere", "Unknown"]
    (source / "model_index.json").write_text(json.dumps(index))
    with shmload.view(source, components=["vae"], keep=True) as path:
        assert (path / "unet").samefile(source / "unet")
        assert not (path / "vae").samefile(source / "vae")
        assert_same(load_file(path / "vae" / "diffusion_pytorch_model.safetensors"), TENSORS)
    assert len(shmload.segments()) == 1
    with pytest.raises(shmload.UnknownComponent, match=r"'vea'.*unet, vae"):
        shmload.warm(source, components=["vea"])


def test_view_can_be_read_by_other_processes(checkpoint):
    with shmload.view(checkpoint, torch_dtype=torch.bfloat16) as path:
        done = subprocess.run(["cat", path], stdin=subprocess.DEVNULL, capture_output=True)
        assert done.stdout == path.read_bytes()


def test_linked_file_is_the_one_that_was_planned(tmp_path):
    path, newer = tmp_path / "model.safetensors", tmp_path / "newer"
    save_file({"a": torch.arange(4)}, path)  # has nothing to cast
    save_file({"a": torch.ones(4)}, newer)
    with shmload.view(path, dtype="bfloat16") as lent:
        os.replace(newer, path)
        assert load_file(lent)["a"].tolist() == [0, 1, 2, 3]
