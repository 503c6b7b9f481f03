"""Segments are attached while their source is unchanged; they can be listed, verified, removed."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch
from harm import overwrite, overwrite_and_set_the_clock_back
from safetensors.torch import load_file, save_file
from warming import CHILD, NBYTES, SHM, TENSORS, as_bf16, assert_same, begun

import shmload
from shmload._segments import listing
from shmload._segments.names import name_prefix

# A source that changes ----------------------------------------------------------------------------


@pytest.mark.parametrize("change", [overwrite, overwrite_and_set_the_clock_back])
def test_changed_source_is_not_served(checkpoint, change):
    old = shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    assert [info.is_current for info in shmload.segments()] == [True]
    change(checkpoint)
    assert [info.is_current for info in shmload.segments()] == [False]
    (shard,) = shmload.plan(checkpoint, torch_dtype=torch.bfloat16).shards
    assert shard.action is shmload.Action.DECODE
    new = shmload.warm(checkpoint, torch_dtype=torch.bfloat16)
    assert new.read_nbytes == NBYTES
    assert new.segments != old.segments
    assert_same(
        shmload.load_state_dict(checkpoint, torch.bfloat16, keep=True),
        as_bf16(load_file(checkpoint)),
    )
    assert {info.name: info.is_current for info in shmload.segments()} == {
        old.segments[0]: False,
        new.segments[0]: True,
    }


# Listing and checking -----------------------------------------------------------------------------


def test_what_is_no_segment_is_not_listed(checkpoint):
    (name,) = shmload.warm(checkpoint).segments
    for planted in (f"{name_prefix()}x", f"{name_prefix()}{'g' * 30}", f"{name}.bak", "sem.other"):
        (SHM / planted).write_bytes(b"x")
    (SHM / f"{name_prefix()}{'0' * 30}").symlink_to(SHM / name)
    (SHM / f"{name_prefix()}{'1' * 30}").mkdir()
    os.mkfifo(SHM / f"{name_prefix()}{'2' * 30}")
    try:
        assert [info.name for info in shmload.segments()] == [name]
        assert [info.name for info in shmload.verify()] == [name]
        assert shmload.collect_garbage() == []
    finally:
        (SHM / "sem.other").unlink()


def test_load_need_not_wait_for_a_listing_that_looks_at_a_slow_disk(checkpoint, monkeypatch):
    shmload.warm(checkpoint)
    identify, read_again = listing.identify, []

    def load_and_identify(*args):
        monkeypatch.setattr(listing, "identify", identify)
        read_again.append(shmload.warm(checkpoint).read_nbytes)
        return identify(*args)

    monkeypatch.setattr(listing, "identify", load_and_identify)
    assert [info.is_current for info in shmload.segments()] == [True]
    assert read_again == [0]


def damage(name, offset, value=None):
    """Change one byte of a segment, like faulty memory."""
    path = SHM / name
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        old = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([old[0] ^ 1 if value is None else value]))
    path.chmod(0o400)


@pytest.mark.parametrize("offset", [4096, -1])
def test_flipped_byte_is_found(checkpoint, tmp_path, offset):
    (name,) = shmload.warm(checkpoint, torch_dtype=torch.bfloat16).segments
    other = tmp_path / "other.safetensors"
    save_file(TENSORS, other)
    shmload.warm(other)
    damage(name, offset)
    for check in (
        shmload.verify,
        lambda: shmload.verify(name),
        lambda: shmload.warm(checkpoint, torch_dtype=torch.bfloat16, verify=True),
        lambda: shmload.load_state_dict(checkpoint, torch.bfloat16, verify=True),
    ):
        with pytest.raises(shmload.SegmentCorrupt, match=f"{name}.*shmload rm {name}"):
            check()
    assert len(shmload.verify(str(other))) == 1
    shmload.evict(name)
    assert shmload.warm(checkpoint, torch_dtype=torch.bfloat16, verify=True).read_nbytes == NBYTES


def cut_short(name, nbytes):
    (SHM / name).chmod(0o600)
    os.truncate(SHM / name, nbytes)


@pytest.mark.parametrize(
    "harm",
    [
        lambda name: cut_short(name, 4096 + 64),
        lambda name: cut_short(name, 0),
        lambda name: damage(name, 8, ord("[")),
    ],
    ids=["cut", "empty", "header"],
)
def test_segment_with_a_broken_header_is_found_and_can_be_removed(checkpoint, shm_names, harm):
    (name,) = shmload.warm(checkpoint, torch_dtype=torch.bfloat16).segments
    harm(name)
    shmload.segments()  # must not fail; it may list the segment or not
    for check in (shmload.verify, lambda: shmload.verify(name)):
        with pytest.raises(shmload.SegmentCorrupt, match=name):
            check()
    with pytest.raises(shmload.ShmloadError, match=name):
        shmload.load_state_dict(checkpoint, torch.bfloat16)
    shmload.evict(name)
    assert shm_names() == []


def test_command_names_every_corrupt_segment(shards, evicts, command):
    names = [shmload.warm(shard, dtype="bfloat16").segments[0] for shard in shards[:3]]
    damage(names[0], -1)
    cut_short(names[1], 0)
    code, printed, said = command("verify", "--json")
    assert code == 1
    answer = json.loads(printed)
    assert sorted(answer["corrupt"]) == sorted(names[:2])
    assert [each["name"] for each in answer["sound"]] == names[2:]
    assert f"{shards[0]}: segment {names[0]} is corrupt: its digest" in said
    assert f"segment {names[1]} is corrupt: its header is damaged; remove" in said
    assert command("verify")[1] == "sound: 1 segment, 1.00 MiB\n"


# Removing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spell",
    [
        lambda path, name: name,
        lambda path, name: str(path),
        lambda path, name: path,
        lambda path, name: str(path.parent),
        lambda path, name: f"{path.parent}/",
        lambda path, name: os.path.relpath(path),
        lambda path, name: f"{path.parent}/../{path.parent.name}/{path.name}",
    ],
    ids=["name", "source", "path", "directory", "slash", "relative", "roundabout"],
)
def test_evict_takes_names_and_sources(checkpoint, tmp_path, shm_names, spell):
    (name,) = shmload.warm(checkpoint).segments
    other = tmp_path / "checkpoint2" / "model.safetensors"  # not below "checkpoint"
    other.parent.mkdir()
    shutil.copy(checkpoint, other)
    (kept,) = shmload.warm(other).segments
    assert [info.name for info in shmload.evict(spell(checkpoint, name))] == [name]
    assert shm_names() == [kept]


def test_evict_wants_to_know_what(checkpoint, monkeypatch, shm_names):
    shmload.warm(checkpoint)
    before = shm_names()
    with pytest.raises(ValueError, match="evict"):
        shmload.evict()
    with pytest.raises(shmload.SegmentNotFound, match="'nothing'"):
        shmload.evict("nothing")
    with pytest.raises(shmload.SegmentNotFound, match="'nothing'"):
        shmload.verify("nothing")
    # An empty name (an unset shell variable) must not mean the current directory.
    monkeypatch.chdir(checkpoint.parent)
    with pytest.raises((ValueError, shmload.SegmentNotFound)):
        shmload.evict("")
    assert shm_names() == before


def test_evict_leaves_the_leased_and_takes_the_rest(folder, child):
    names = shmload.warm(folder, torch_dtype=torch.bfloat16).segments
    holder = child(CHILD, "load", folder / "model-00001-of-00003.safetensors")
    begun(holder)
    holder.expect("LOADED")
    with pytest.raises(shmload.SegmentBusy) as caught:
        shmload.evict(folder)
    assert caught.value.names == names[:1]
    assert "component (bfloat16, int64)" in str(caught.value)
    assert "end that process" in str(caught.value)
    assert [info.name for info in shmload.segments()] == [names[0]]
    holder.end()
    assert [info.name for info in shmload.evict(folder)] == [names[0]]


def test_garbage_is_outdated_segments_and_abandoned_parts(checkpoint, tmp_path, child, shm_names):
    (current,) = shmload.warm(checkpoint, torch_dtype=torch.bfloat16).segments
    sources = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for source in sources:
        save_file(TENSORS, source)
    (outdated,) = shmload.warm(sources[0]).segments
    killed, alive = (child(CHILD, "warm", source) for source in sources[1:])
    for process in (killed, alive):
        begun(process)
        process.expect("AT")
    parts = set(shm_names()) - {current, outdated}
    assert shmload.collect_garbage() == []
    killed.end()
    sources[0].unlink()
    garbage = set(shmload.collect_garbage())
    assert garbage == {outdated, *(parts - set(shm_names()))}
    alive.say()
    (living,) = alive.expect("READ").split()[1:]
    assert f"{living}.part" in parts
    assert shm_names() == sorted([current, living])


def test_view_of_a_killed_process_is_garbage(checkpoint, child, shm_names):
    process = child(
        "import sys, shmload\n"
        "with shmload.view(sys.argv[1], torch_dtype='bfloat16') as path:\n"
        "    print('PATH', path, flush=True)\n"
        "    sys.stdin.read()\n",
        checkpoint,
    )
    view = Path(process.expect("PATH")).parent
    old = time.time() - 3600
    os.utime(view, (old, old))
    assert shmload.collect_garbage() == []  # in use
    process.end()
    assert shmload.collect_garbage() == [view.name]
    assert shm_names() == []
