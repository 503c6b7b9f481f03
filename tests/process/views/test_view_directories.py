"""A view directory stays, its segments are pinned, and another build replaces it in one step."""

import contextlib
import errno
import json
import os
import shutil

import pytest
from safetensors.torch import load_file, save_file
from warming import TENSORS, as_bf16, assert_same

import shmload
from shmload._segments.view_folder import MARKER

_AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


@pytest.fixture(autouse=True)
def state(configure, tmp_path):
    """A register of this test's own."""
    configure(state_dir=tmp_path / "state")
    return tmp_path / "state"


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


def nothing_beside(place):
    return os.listdir(place.parent) == [place.name]


def test_directory_has_all_that_the_source_has(folder, place):
    (folder / "notes.txt").write_text("notes")
    (folder / "pytorch_model.bin").write_bytes(b"\x80pickle")
    (folder / "samples").mkdir()
    (folder / ".git").mkdir()
    made = shmload.view_directory(folder, place, dtype="bf16")
    assert (made.directory, made.state, made.dtype) == (str(place), "ready", "bfloat16")
    assert_same(weights_of(place), as_bf16(TENSORS))
    assert {*os.listdir(place)} == {*os.listdir(folder)} - {".git"} | {MARKER}
    # What belongs to these weights must not change with the source; what is large is not copied.
    assert not (place / "notes.txt").is_symlink()
    assert (place / "notes.txt").read_text() == "notes"
    for name in ("pytorch_model.bin", "samples"):
        assert os.readlink(place / name) == str(folder / name)
    assert pinned() == [True] * 3
    assert nothing_beside(place)


def test_file_alone_has_a_directory_too(checkpoint, place):
    shmload.view_directory(checkpoint, place, dtype="bfloat16")
    assert {*os.listdir(place)} == {MARKER, checkpoint.name}
    assert_same(weights_of(place), as_bf16(TENSORS))


def test_configurations_name_the_dtype_of_the_segments(folder, place):
    config = {"torch_dtype": "float32", "text_config": {"dtype": "float32"}, "other": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    shmload.view_directory(folder, place, dtype="bfloat16")
    assert json.loads((place / "config.json").read_text()) == {
        "torch_dtype": "bfloat16",
        "text_config": {"dtype": "bfloat16"},
        "other": "float32",
    }
    shmload.view_directory(folder, place, replace=True)
    assert json.loads((place / "config.json").read_text()) == config


def test_second_call_changes_nothing(folder, place, monkeypatch):
    first = shmload.view_directory(folder, place, dtype="bfloat16")
    inode = place.stat().st_ino
    monkeypatch.chdir(place.parent)
    assert shmload.view_directory(str(folder), place.name, dtype="bf16") == first
    assert place.stat().st_ino == inode


@pytest.mark.parametrize("harm", [os.unlink, lambda path: os.replace(path, f"{path}.away")])
def test_directory_that_was_harmed_is_made_again(folder, place, harm):
    shmload.view_directory(folder, place, dtype="bfloat16")
    harm(sorted(place.glob("*.safetensors"))[0])
    shmload.view_directory(folder, place, dtype="bfloat16")
    assert_same(weights_of(place), as_bf16(TENSORS))


def test_other_arguments_are_refused_unless_they_replace(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    with pytest.raises(shmload.ViewRefused, match=r"dtype 'bfloat16' instead of 'float16'.*repl"):
        shmload.view_directory(folder, place, dtype="float16")
    shmload.view_directory(folder, place, dtype="float16", replace=True)
    assert weights_of(place)["a.weight"].element_size() == 2
    # The old ones may go; the one without floats is both old and new.
    assert sorted(pinned()) == [False] * 2 + [True] * 3
    assert len(shmload.view_directories()) == 1
    assert nothing_beside(place)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.write_text("mine")])
def test_what_is_no_view_directory_is_left_alone(folder, place, make):
    place.parent.mkdir()
    make(place)
    for replace in (False, True):
        with pytest.raises(shmload.ViewRefused, match="no view directory; choose another place"):
            shmload.view_directory(folder, place, replace=replace)
    with pytest.raises(shmload.ViewNotFound):
        shmload.remove_view_directory(place)
    assert shmload.segments() == []
    assert nothing_beside(place)


def test_directory_in_its_source_is_refused(folder, place):
    for inner, outer in ((folder / "view", folder), (folder.parent, folder)):
        with pytest.raises((shmload.ArgumentError, shmload.ViewRefused)):
            shmload.view_directory(outer, inner)
    shmload.view_directory(folder, place)
    with pytest.raises(shmload.ArgumentError, match="is a view directory itself"):
        shmload.view_directory(place, place.parent / "second")


def test_link_to_a_view_directory_stands_for_it(folder, place, tmp_path):
    made = shmload.view_directory(folder, place)
    (tmp_path / "link").symlink_to(place)
    assert shmload.view_directory(folder, tmp_path / "link") == made
    shmload.remove_view_directory(tmp_path / "link")
    assert not place.exists()


def test_changed_source_is_followed(folder, place):
    first = shmload.view_directory(folder, place, dtype="bfloat16")
    (shard, *_) = sorted(folder.glob("*.safetensors"))
    other = {name: tensor + 1 for name, tensor in load_file(shard).items()}
    save_file(other, shard.with_suffix(".new"), {"format": "pt"})
    os.replace(shard.with_suffix(".new"), shard)
    (listed,) = shmload.view_directories()
    assert listed.state == "changed"
    # A load of the new files takes pins along; not those of a directory that is still in use.
    shmload.warm(folder, dtype="bfloat16")
    assert shmload.collect_garbage() == []
    assert_same(weights_of(place), as_bf16(TENSORS))
    second = shmload.restore_view_directory(place)
    assert second.state == "ready"
    assert_same(weights_of(place), as_bf16(TENSORS | other))
    assert set(shmload.collect_garbage()) == {*first.segments} - {*second.segments}
    assert pinned() == [True] * 3


def test_restart_is_made_good(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    for info in shmload.segments():
        os.unlink(f"/dev/shm/{info.name}")
    (listed,) = shmload.view_directories()
    assert listed.state == "empty"
    assert shmload.restore_view_directory(place).state == "ready"
    assert_same(weights_of(place), as_bf16(TENSORS))
    assert pinned() == [True] * 3


def test_restart_that_also_emptied_the_place(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    shutil.rmtree(place.parent)
    assert shmload.restore_view_directory(place).state == "ready"
    assert_same(weights_of(place), as_bf16(TENSORS))


def test_deleted_directory_gives_its_place_to_another_view(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    shutil.rmtree(place)
    made = shmload.view_directory(folder, place, dtype="float16")
    assert (made.state, made.dtype) == ("ready", "float16")
    (listed,) = shmload.view_directories()
    assert listed == made
    assert sorted(info.name for info in shmload.segments() if info.is_pinned) == sorted(
        made.segments
    )
    with pytest.raises(shmload.ViewRefused, match="--replace"):
        shmload.view_directory(folder, place, dtype="bfloat16")


def test_moved_directory_is_known_at_its_new_place(folder, place, tmp_path):
    shmload.view_directory(folder, place, dtype="bfloat16")
    place.rename(tmp_path / "moved")
    (listed,) = shmload.view_directories()
    assert listed.state == "gone"
    shmload.view_directory(folder, tmp_path / "moved", dtype="bfloat16")
    (listed,) = shmload.view_directories()
    assert (listed.directory, listed.state) == (str(tmp_path / "moved"), "ready")
    assert pinned() == [True] * 3


@pytest.mark.parametrize("kind", ["absolute", "above", "link"])
def test_directory_that_came_with_a_marker_has_nothing_outside_removed(place, tmp_path, kind):
    """Such as one that was unpacked: its marker is this user's, and names what it likes."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    place.mkdir(parents=True)
    (place / "away").symlink_to(tmp_path)
    name = {"absolute": str(precious), "above": "../precious", "link": "away/precious"}[kind]
    record = {
        "directory": str(place), "arguments": {"source": str(place)}, "build": "0" * 16,
        "made_at": 0, "segments": [], "nbytes": 0, "links": {}, "copies": {name: "x"},
    }  # fmt: skip
    (place / MARKER).write_text(json.dumps(record))
    with contextlib.suppress(shmload.ShmloadError):
        shmload.remove_view_directory(place)
    assert precious.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_directory_with_another_users_marker_is_none(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    os.chown(place / MARKER, 1, 1)
    with pytest.raises(shmload.ShmloadError):
        shmload.view_directory(folder, place, dtype="bfloat16")


def test_view_where_this_user_may_not_write_is_left_as_it_is(folder, place, monkeypatch):
    shmload.view_directory(folder, place, dtype="bfloat16")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(shmload.ViewUnwritable, match="have its owner remove the view"):
        shmload.remove_view_directory(place)
    monkeypatch.undo()
    assert [each.state for each in shmload.view_directories()] == ["ready"]


def test_removal_that_the_file_system_refuses_is_said_and_finished_later(
    folder, place, monkeypatch
):
    def refuse(old, new):
        if os.path.isdir(old):
            raise OSError(errno.EROFS, "Read-only file system")
        rename(old, new)

    rename = os.rename
    shmload.view_directory(folder, place, dtype="bfloat16")
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(shmload.ViewUnwritable, match=r"Read-only file system; what is under way"):
        shmload.remove_view_directory(place)
    monkeypatch.undo()
    shmload.remove_view_directory(place)
    assert shmload.view_directories() == []
    assert not place.exists()


@pytest.mark.timeout(60)
def test_pipe_in_place_of_a_marker_does_not_hang(place):
    place.mkdir(parents=True)
    os.mkfifo(place / MARKER)
    with pytest.raises(shmload.ViewNotFound):
        shmload.remove_view_directory(place)


def test_copied_directory_is_another_one(folder, place, tmp_path):
    shmload.view_directory(folder, place, dtype="bfloat16")
    shutil.copytree(place, tmp_path / "copy", symlinks=True)
    shmload.view_directory(folder, tmp_path / "copy", dtype="bfloat16")
    shmload.remove_view_directory(place)
    assert pinned() == [True] * 3
    shmload.remove_view_directory(tmp_path / "copy")
    assert pinned() == [False] * 3


def test_forgotten_directory_is_removed_as_any(folder, place, state):
    shmload.view_directory(folder, place)
    shutil.rmtree(state)
    assert shmload.view_directories() == []
    shmload.remove_view_directory(place)
    assert not place.exists()
    assert pinned() == [False] * 3


def test_deleted_directory_keeps_its_segments_until_it_is_forgotten(folder, place):
    shmload.view_directory(folder, place)
    shutil.rmtree(place)
    assert shmload.collect_garbage() == []
    assert shmload.remove_view_directory(place).state == "gone"
    assert pinned() == [False] * 3


def test_segments_are_pinned_as_long_as_one_directory_needs_them(folder, place, tmp_path):
    shmload.view_directory(folder, place)
    shmload.view_directory(folder, tmp_path / "second")
    with pytest.raises(shmload.SegmentProtected, match="--remove"):
        shmload.unpin(folder)
    with pytest.raises(shmload.SegmentBusy, match=r"by the view directories .*a place.*second"):
        shmload.evict(folder)
    shmload.remove_view_directory(place)
    assert pinned() == [True] * 3
    shmload.remove_view_directory(tmp_path / "second")
    assert pinned() == [False] * 3
    assert len(shmload.evict(folder)) == 3


@pytest.mark.parametrize("when", ["before", "meanwhile", "by warm", "and undone"])
def test_pin_of_the_user_outlives_the_directory(folder, place, when):
    if when == "before":
        shmload.warm(folder, dtype="bfloat16", pin=True)
    shmload.view_directory(folder, place, dtype="bfloat16")
    if when in ("meanwhile", "and undone"):
        shmload.pin(folder)
    elif when == "by warm":
        shmload.warm(folder, dtype="bfloat16", pin=True)
    if when == "and undone":
        with pytest.raises(shmload.SegmentProtected):
            shmload.unpin(folder)
    assert pinned() == [True] * 3
    shmload.remove_view_directory(place)
    assert pinned() == [when != "and undone"] * 3


def test_room_is_not_made_of_a_view_directory(folder, place, configure, shards):
    made = shmload.view_directory(folder, place)
    configure(budget=made.nbytes + (1 << 20))
    with pytest.raises(shmload.SharedMemoryFull):
        shmload.warm(shards[0])
    shmload.warm(folder, keep_for=1)
    assert_same(weights_of(place), TENSORS)


def test_listing_says_which_models_belong_to_a_directory(folder, checkpoint, place):
    shmload.view_directory(folder, place)
    shmload.warm(checkpoint)
    assert {model.source: model.views for model in shmload.models()} == {
        str(folder): (str(place),),
        str(checkpoint): (),
    }
    assert f"  {place}" in str(shmload.models())


def test_files_of_others_stay(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    (place / "cache").mkdir()
    (place / "cache" / "mine").write_text("mine")
    shmload.view_directory(folder, place, dtype="float16", replace=True)
    assert (place / "cache" / "mine").read_text() == "mine"
    shmload.remove_view_directory(place)
    assert [str(path.relative_to(place)) for path in place.rglob("*")] == ["cache", "cache/mine"]
    assert nothing_beside(place)


def test_file_of_others_in_the_place_of_ours_is_put_aside(folder, place):
    shmload.view_directory(folder, place, dtype="bfloat16")
    (first, *_) = sorted(place.glob("*.safetensors"))
    first.unlink()
    first.write_text("mine")
    shmload.view_directory(folder, place, dtype="bfloat16")
    assert_same(weights_of(place), as_bf16(TENSORS))
    (kept,) = place.parent.glob(f"{place.name}.kept-*")
    assert [path.read_text() for path in kept.iterdir()] == ["mine"]


def test_place_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(shmload.ViewUnwritable, match="choose another place"):
        shmload.view_directory(folder, tmp_path / "file" / "view")
    assert shmload.view_directories() == []
    assert not any(pinned())


def test_source_without_weights_to_share_is_refused(tmp_path, place):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"\x80pickle")
    with pytest.raises(shmload.SourceNotFound, match=r"pytorch_model\.bin"):
        shmload.view_directory(tmp_path / "model", place)
    assert not place.parent.exists()


def test_hub_id(folder, place, hub_cache):
    hub_cache.add("org/name", folder)
    made = shmload.view_directory("org/name", place, dtype="bfloat16", cache_dir=hub_cache.root)
    assert made.source == "org/name"
    assert_same(weights_of(place), as_bf16(TENSORS))
    shutil.rmtree(place)
    assert shmload.restore_view_directory(place).segments == made.segments


@pytest.mark.parametrize("directory", ["", b"view", "a\0b", "\udcff"])
def test_directory_that_no_register_can_name(folder, directory):
    with pytest.raises(shmload.ArgumentError, match="give a path"):
        shmload.view_directory(folder, directory)


@pytest.fixture
def pipeline(tmp_path, evicts):
    """A pipeline with two components, one of which also has a pickle, and a scheduler."""
    source = tmp_path / "pipeline"
    index = {"_class_name": "P", "scheduler": ["nowhere", "Scheduler"]}
    for name in ("unet", "vae"):
        (source / name).mkdir(parents=True)
        save_file(TENSORS, source / name / "diffusion_pytorch_model.safetensors")
        index[name] = ["nowhere", "Unknown"]
    (source / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"\x80pickle")
    (source / "scheduler").mkdir()
    (source / "scheduler" / "scheduler_config.json").write_text("{}")
    (source / "model_index.json").write_text(json.dumps(index))
    return source


def links_in(directory):
    return {
        str(path.relative_to(directory)): os.readlink(path).partition("shmload-")[0]
        for path in sorted(directory.rglob("*"))
        if path.is_symlink()
    }


def test_pipeline(pipeline, place):
    shmload.view_directory(pipeline, place, dtype="bfloat16")
    assert links_in(place) == {
        "unet/diffusion_pytorch_model.bin": str(pipeline / "unet/diffusion_pytorch_model.bin"),
        "unet/diffusion_pytorch_model.safetensors": "/dev/shm/",
        "vae/diffusion_pytorch_model.safetensors": "/dev/shm/",
    }
    assert (place / "scheduler" / "scheduler_config.json").read_text() == "{}"


def test_components_that_are_left_out_lead_to_their_files(pipeline, place):
    made = shmload.view_directory(pipeline, place, dtype="bfloat16", components=["vae"])
    assert made.components == ("vae",)
    original = pipeline / "unet" / "diffusion_pytorch_model.safetensors"
    assert links_in(place)["unet/diffusion_pytorch_model.safetensors"] == str(original)
    assert links_in(place)["vae/diffusion_pytorch_model.safetensors"] == "/dev/shm/"


def test_copied_file_that_changes_under_its_old_time_is_copied_again(folder, place):
    config = folder / "config.json"
    config.write_text('{"a": 1}')
    shmload.view_directory(folder, place, dtype="bfloat16")
    before = config.stat()
    config.write_text('{"a": 2}')
    os.utime(config, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` does
    shmload.view_directory(folder, place, dtype="bfloat16")
    assert json.loads((place / "config.json").read_text()) == {"a": 2}


def give_away(path):
    os.chown(path, 65534, 65534)


@pytest.mark.parametrize(
    ("what", "harm"),
    [
        ("*.json", lambda path: path.chmod(0o660)),
        pytest.param("*.json", give_away, marks=_AS_ROOT),
        pytest.param("", give_away, marks=_AS_ROOT),
    ],
)
def test_entry_that_others_could_have_written_is_left_alone(checkpoint, place, state, what, harm):
    shmload.view_directory(checkpoint, place)
    register = state / "views"
    assert register.stat().st_mode & 0o777 == 0o700
    assert len(shmload.view_directories()) == 1
    for path in list(register.glob(what)) if what else [register]:
        harm(path)
    assert shmload.view_directories() == []
    shmload.collect_garbage()
    assert weights_of(place)
