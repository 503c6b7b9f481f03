"""Damaged, missing and special files each raise their own error, with path and remedy.

tests/unit/checkpoints/test_header.py has every kind of bad header; here a few go through every
public function.
"""

import errno
import json
import os
import shutil

import pytest
import torch
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


@every_door
def test_truncated_shard_among_good_ones(folder, door):
    shard = folder / "model-00002-of-00002.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    refusal(door, folder, shmload.ShardTruncated, shard)


def lie(content, old, new):
    assert content.count(old) == 1
    assert len(old) == len(new)
    return content.replace(old, new)


LIES = {
    "length": lambda content: b"\xff" * 8 + content[8:],
    "bytes behind": lambda content: content + b"x",
    "shape": lambda content: lie(content, b"[50,100]", b"[50,101]"),
    "dtype": lambda content: lie(content, b'"F32"', b'"F99"'),
    "offsets": lambda content: lie(content, b"[0,56]", b"[8,64]"),
    "json": lambda content: lie(content, b'"F32",', b'"F32"}'),
    "twice": lambda content: lie(content, b'"b":{', b'"a":{'),
}
# What is there instead of safetensors, and a part of the remedy.
OTHERS = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
    "page": (b"<!doctype html>" + bytes(99), "hf auth login"),
}


@every_door
@pytest.mark.parametrize("kind", LIES)
def test_lying_header(checkpoint, door, kind):
    checkpoint.write_bytes(LIES[kind](checkpoint.read_bytes()))
    refusal(door, checkpoint, shmload.ShardMalformed, checkpoint, "download it again")


@every_door
@pytest.mark.parametrize("kind", OTHERS)
def test_file_of_another_kind(checkpoint, door, kind):
    content, remedy = OTHERS[kind]
    checkpoint.write_bytes(content)
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
def test_pipeline_that_points_outside_its_directory(pipeline, door):
    shutil.copytree(pipeline / "vae", pipeline.parent / "outside")
    index = pipeline / "model_index.json"
    index.write_text(json.dumps({"_class_name": "P", "../outside": ["nowhere", "Unknown"]}))
    refusal(door, pipeline, shmload.IndexMalformed, index, "../outside", "download the checkpoint")


@every_door
def test_index_that_is_no_json(folder, door):
    index = folder / "model.safetensors.index.json"
    index.write_text("{")
    refusal(door, folder, shmload.IndexMalformed, index, "JSON", "download the checkpoint again")


@every_door
@pytest.mark.parametrize("dtype", ["bfloat17", "int8", torch.int32, 16])
def test_wrong_dtype(checkpoint, door, dtype):
    error = refusal(
        door, checkpoint, shmload.UnknownDtype, repr(dtype), "bfloat16", torch_dtype=dtype
    )
    assert isinstance(error, ValueError)


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


def test_disk_that_fails_a_worker(checkpoint, workers_that):
    starts = workers_that(
        """
        def fail(*args):
            raise OSError(5, os.strerror(5))
        fill.os.preadv = fail
        """
    )
    refusal(shmload.warm, checkpoint, shmload.ShardUnreadable, checkpoint, "Input/output error")
    assert starts() == 1  # a second worker would fail too, so none is started
