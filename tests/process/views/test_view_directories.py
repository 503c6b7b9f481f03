"""A view directory stays: links to pinned segments, which the same call makes anew."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from warming import TENSORS, as_bf16, assert_same

import shmload
from shmload._loading import view_directory as module
from shmload._loading.view_directory import MARKER


@pytest.fixture
def place(tmp_path):
    return tmp_path / "a place" / "für ein Modell"


def weights_of(directory):
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        assert os.readlink(path).startswith("/dev/shm/shmload-")
        found |= load_file(path)
    return found


def pinned():
    return [info.is_pinned for info in shmload.segments()]


def test_directory_has_all_that_the_source_has(folder, place):
    (folder / "notes.txt").write_text("notes")
    (folder / "samples").mkdir()
    assert shmload.view_directory(folder, place, dtype="bf16") == place
    assert_same(weights_of(place), as_bf16(TENSORS))
    assert {*os.listdir(place)} == {*os.listdir(folder), MARKER}
    for name in ("notes.txt", "samples"):
        assert os.readlink(place / name) == str(folder / name)
    assert pinned() == [True] * 3
    assert os.listdir(place.parent) == [place.name]


def test_configurations_name_the_dtype_of_the_segments(folder, place):
    config = {"torch_dtype": "float32", "text_config": {"dtype": "float32"}, "other": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    for dtype in ("bfloat16", "float16"):
        shmload.view_directory(folder, place, dtype=dtype)
        assert json.loads((place / "config.json").read_text()) == {
            "torch_dtype": dtype,
            "text_config": {"dtype": dtype},
            "other": "float32",
        }
    shmload.view_directory(folder, place)
    assert json.loads((place / "config.json").read_text()) == config
    assert json.loads((folder / "config.json").read_text()) == config


@pytest.mark.parametrize("harm", ["restart", "deleted", "emptied", "other dtype"])
def test_same_call_makes_it_anew(folder, place, harm, monkeypatch):
    dtype = "float16" if harm == "other dtype" else "bfloat16"
    shmload.view_directory(folder, place, dtype=dtype)
    if harm == "restart":
        for info in shmload.segments():
            os.unlink(f"/dev/shm/{info.name}")
    elif harm == "deleted":
        shutil.rmtree(place.parent)
    elif harm == "emptied":
        next(place.glob("*.safetensors")).unlink()
    place.parent.mkdir(exist_ok=True)
    monkeypatch.chdir(place.parent)
    assert shmload.view_directory(str(folder), place.name, dtype="bfloat16") == place
    assert_same(weights_of(place), as_bf16(TENSORS))


def test_changed_source_is_followed_and_its_old_weights_may_go(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    (shard, *_) = sorted(folder.glob("*.safetensors"))
    before = os.readlink(place / shard.name)
    other = {name: tensor + 1 for name, tensor in load_file(shard).items()}
    save_file(other, shard.with_suffix(".new"), {"format": "pt"})
    os.replace(shard.with_suffix(".new"), shard)
    shmload.view_directory(folder, place, dtype="bfloat16")
    assert_same(weights_of(place), as_bf16(TENSORS | other))
    assert shmload.collect_garbage() == [os.path.basename(before)]
    assert pinned() == [True] * 3


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_text("mine")])
def test_what_is_no_view_directory_is_left_alone(folder, place, make):
    place.mkdir(parents=True)
    make(place / "inner")
    where = place if (place / "inner").is_dir() else place / "inner"
    with pytest.raises(shmload.ViewRefused, match="no view directory; choose another place"):
        shmload.view_directory(folder, where)
    assert shmload.segments() == []
    assert os.listdir(place) == ["inner"]


def test_files_of_others_stay(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    (place / "mine").write_text("mine")
    (first, *_) = sorted(place.glob("*.safetensors"))
    shmload.view_directory(folder, place, dtype="float16")
    assert (place / "mine").read_text() == "mine"
    first.unlink()
    first.write_text("mine")
    with pytest.raises(shmload.ViewRefused, match="no file of the view directory"):
        shmload.view_directory(folder, place, dtype="bfloat16")
    assert first.read_text() == "mine"


def test_directory_in_its_source_is_refused(folder, place):
    for inner, outer in ((folder / "view", folder), (folder.parent, folder)):
        with pytest.raises((shmload.ArgumentError, shmload.ViewRefused)):
            shmload.view_directory(outer, inner)
    shmload.view_directory(folder, place)
    with pytest.raises(shmload.ArgumentError, match="is a view directory itself"):
        shmload.view_directory(place, place.parent / "second")


@pytest.mark.parametrize("name", ["away/precious", "../precious", "/etc/passwd"])
def test_directory_that_came_with_a_marker_has_nothing_outside_removed(
    folder, place, tmp_path, name
):
    """Such as one that was unpacked: its marker is this user's, and names what it likes."""
    (tmp_path / "precious").write_text("mine")
    place.mkdir(parents=True)
    (place / "away").symlink_to(tmp_path)
    (place / MARKER).write_text(name)
    with contextlib.suppress(shmload.ShmloadError):
        shmload.view_directory(folder, place)
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.fixture
def snapshot(saved, tmp_path, evicts):
    """A pipeline as in a hub cache: each file is a link to a blob."""
    source, snapshot, blobs = saved("stable-diffusion"), tmp_path / "snapshot", tmp_path / "blobs"
    shutil.copytree(source, blobs)
    for file in filter(Path.is_file, Path(source).rglob("*")):
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / file.relative_to(source))
    return snapshot


def layout(folder):
    return {path: path.is_symlink() and os.readlink(path) for path in folder.rglob("*")}


@pytest.mark.libraries
def test_other_components_give_another_layout_and_leave_the_source(snapshot, place, tmp_path):
    before = layout(snapshot)
    shmload.view_directory(snapshot, place, dtype="bfloat16", components=["unet"])
    narrow = layout(place)
    shmload.view_directory(snapshot, place, dtype="bfloat16")
    assert layout(snapshot) == before
    fresh = shmload.view_directory(snapshot, tmp_path / "fresh", dtype="bfloat16")
    assert layout(place) == {place / k.relative_to(fresh): to for k, to in layout(fresh).items()}
    shmload.view_directory(snapshot, place, dtype="bfloat16", components=["unet"])
    assert layout(place) == narrow
    shmload.view_directory(snapshot, place, dtype="bfloat16")
    (place / "vae" / "mine").write_text("mine")
    with pytest.raises(shmload.ViewRefused, match="vae/mine is no file of the view directory"):
        shmload.view_directory(snapshot, place, dtype="bfloat16", components=["unet"])
    assert weights_of(place / "vae")


def test_killed_call_is_completed_by_the_same_call(folder, place, monkeypatch):
    """It leaves what it has made until then, and a link that has no name yet."""
    left = 3

    def stop(self, target):
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        os.symlink(target, self)

    monkeypatch.setattr(module.Path, "symlink_to", stop)
    with pytest.raises(KeyboardInterrupt):
        shmload.view_directory(folder, place, dtype="bfloat16")
    monkeypatch.undo()
    (place / f"{MARKER}-new").symlink_to("/nowhere")
    shmload.view_directory(folder, place, dtype="bfloat16")
    assert_same(weights_of(place), as_bf16(TENSORS))
    assert {*os.listdir(place)} == {*os.listdir(folder), MARKER}


def test_call_that_ends_while_it_writes_a_file_is_completed(folder, place, monkeypatch):
    (folder / "config.json").write_text('{"dtype": "float32"}')
    shmload.view_directory(folder, place, dtype="bfloat16")

    def fill_the_disk(self, content):
        self.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.Path, "write_bytes", fill_the_disk)
    with pytest.raises(shmload.ViewRefused, match="No space left"):
        shmload.view_directory(folder, place, dtype="bfloat16")
    monkeypatch.undo()
    shmload.view_directory(folder, place, dtype="float16")
    assert json.loads((place / "config.json").read_text()) == {"dtype": "float16"}


def test_command(command, folder, place):
    made = command("view", folder, "--dtype", "bf16", "--dir", place)
    assert made == (0, f"{place}: ready\n", "")
    assert_same(weights_of(place), as_bf16(TENSORS))
    assert command("view", folder, "--dir", place, "--quiet") == (0, "", "")
    for arguments in ([], [folder], ["--dir", place]):
        assert command("view", *arguments)[0] == 2
