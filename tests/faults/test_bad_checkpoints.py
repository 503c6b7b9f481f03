"""Damaged, missing and special files each raise their own error, with path and remedy.

tests/unit/checkpoints/test_header.py has every kind of bad header; here a few go through every
public function.
"""

import errno
import json
import os
import shutil

import pytest
from doors import decoding_door, every_door, refusal, view

import shmload
from shmload.workers import fill


@every_door
@pytest.mark.parametrize("length", [0, 5, 8, 100, -4, -1])
def test_truncated_shard(checkpoint, door, length):
    content = checkpoint.read_bytes()
    checkpoint.write_bytes(content[:length])
    error = refusal(door, checkpoint, shmload.ShardTruncated, checkpoint, "download it again")
    assert error.got == len(content[:length])
    assert error.wanted > error.got


# What is there instead, and a part of the remedy.
LIES = {
    "length": (lambda content: b"\xff" * 8 + content[8:], "download it again"),
    "bytes behind": (lambda content: content + b"x", "download it again"),
    "pointer": (lambda _: b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "page": (lambda _: b"<!doctype html>" + bytes(99), "hf auth login"),
}


@every_door
@pytest.mark.parametrize("kind", LIES)
def test_lying_header(checkpoint, door, kind):
    lie, remedy = LIES[kind]
    checkpoint.write_bytes(lie(checkpoint.read_bytes()))
    refusal(door, checkpoint, shmload.ShardMalformed, checkpoint, remedy)


@every_door
def test_missing_shard(folder, door):
    (folder / "model-00001-of-00002.safetensors").unlink()
    error = refusal(
        door,
        folder,
        shmload.ShardMissing,
        folder / "model-00001-of-00002.safetensors",
        folder / "model.safetensors.index.json",
        "download the checkpoint again",
    )
    assert isinstance(error, FileNotFoundError)


@every_door
@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", ".."])
def test_index_that_points_outside_its_directory(folder, door, name):
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder.parent / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    refusal(door, folder, shmload.IndexMalformed, index, repr(name), "move its shards into")


@pytest.mark.parametrize("door", [shmload.warm, shmload.plan, view])
def test_unknown_component(pipeline, door):
    refusal(
        door, pipeline, shmload.UnknownComponent, pipeline, "'vea'", "unet, vae", components=["vea"]
    )


@every_door
@pytest.mark.parametrize(
    "source", ["/no/such/model", "no/such/model/at all", "no/such-model", "nothing", ""]
)
def test_source_that_does_not_exist(door, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = refusal(door, source, shmload.SourceNotFound, source)
    assert isinstance(error, FileNotFoundError)


@pytest.mark.timeout(20)  # a plain open of a FIFO blocks forever
@every_door
@pytest.mark.parametrize("kind", ["fifo", "directory", "loop"])
def test_shard_that_is_no_file(folder, door, kind):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.unlink()
    if kind == "fifo":
        os.mkfifo(shard)
    elif kind == "directory":
        shard.mkdir()
    else:
        shard.symlink_to(shard.name)
    with pytest.raises(shmload.CheckpointError, match=str(shard)) as caught:
        door(folder)
    assert isinstance(caught.value, shmload.ShardUnreadable | shmload.ShardMissing)


def test_shard_that_may_not_be_read(checkpoint, new_child):
    checkpoint.chmod(0)
    # Drop root's capabilities, with which it reads every file.
    prefix = ("setpriv", "--bounding-set=-all", "--inh-caps=-all") if os.geteuid() == 0 else ()
    process = new_child(
        "import sys, shmload\n"
        "for door in (shmload.warm, shmload.plan, shmload.load_state_dict):\n"
        "    try:\n"
        "        door(sys.argv[1])\n"
        "    except shmload.ShardUnreadable as exc:\n"
        "        print('REFUSED', exc.errno, exc, flush=True)\n",
        checkpoint,
        prefix=prefix,
    )
    for _ in range(3):
        assert process.expect("REFUSED") == (
            f"{errno.EACCES} {checkpoint} cannot be read: Permission denied; "
            "check its permissions and the disk it is on"
        )


@decoding_door
def test_disk_that_fails_in_the_middle(checkpoint, door, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fill.os, "preadv", fail)
    refusal(door, checkpoint, shmload.ShardUnreadable, checkpoint, "Input/output error")
