"""A view is a private directory in the library's layout, removed at the end of its block."""

import os

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


def test_files_that_a_library_writes_to_a_view_go_with_it(folder, shm_names):
    with shmload.view(folder, torch_dtype=torch.bfloat16) as path:
        (path / "cache").mkdir()
        (path / "cache" / "model.lock").touch()
    assert shm_names() == []
    assert not (folder / "cache").exists()


def test_linked_file_is_the_one_that_was_planned(tmp_path):
    path, newer = tmp_path / "model.safetensors", tmp_path / "newer"
    save_file({"a": torch.arange(4)}, path)  # has nothing to cast
    save_file({"a": torch.ones(4)}, newer)
    with shmload.view(path, dtype="bfloat16") as lent:
        os.replace(newer, path)
        assert load_file(lent)["a"].tolist() == [0, 1, 2, 3]
