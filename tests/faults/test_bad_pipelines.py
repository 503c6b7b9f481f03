"""Faults of checkpoints raise the same errors through `load_pipeline`, and nothing is left."""

import json
import os

import pytest
import torch
from doors import refusal
from harm import DIE, DIE_ONCE, append
from safetensors.torch import load_file

import shmload


def shard_of(source, component):
    return min((source / component).glob("*.safetensors"))


def truncate(source):
    shard = shard_of(source, "text_encoder")
    os.truncate(shard, shard.stat().st_size - 1)
    return shard


def lie(source):
    append(shard := shard_of(source, "vae"))
    return shard


def remove(source):
    shard = max((source / "transformer").glob("*.safetensors"))
    shard.unlink()
    return shard


def point_outside(source):
    (index,) = (source / "transformer").glob("*.index.json")
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], "../vae/other.safetensors")
    index.write_text(json.dumps(content))
    return index


@pytest.mark.parametrize(
    ("harm", "error", "dtype"),
    [
        (truncate, shmload.ShardTruncated, torch.bfloat16),
        (truncate, shmload.ShardTruncated, torch.float32),  # the file itself is mapped
        (lie, shmload.ShardMalformed, torch.bfloat16),
        (remove, shmload.ShardMissing, torch.bfloat16),
        (point_outside, shmload.IndexMalformed, torch.bfloat16),
    ],
)
def test_pipeline_with_bad_files(copied, harm, error, dtype):
    source = copied("flux", sharded=True)
    refusal(shmload.load_pipeline, source, error, harm(source), torch_dtype=dtype)


@pytest.mark.parametrize("dtype", ["bfloat17", {"transformer": "bfloat17"}, {"default": 7}])
def test_pipeline_in_a_wrong_dtype(saved, dtype):
    refusal(
        shmload.load_pipeline, saved("flux"), shmload.UnknownDtype, "bfloat16", torch_dtype=dtype
    )


@pytest.mark.parametrize("source", ["/no/such/model", "no/such-model"])
def test_pipeline_that_does_not_exist(source):
    refusal(shmload.load_pipeline, source, shmload.SourceNotFound, source)


def test_pipeline_that_is_none(checkpoint, folder):
    refusal(shmload.load_pipeline, folder, shmload.SourceNotFound, folder, "model_index.json")
    refusal(shmload.load_pipeline, checkpoint, shmload.ArgumentError, "pipeline_class")


def test_pipeline_without_room(saved, cgroup):
    cgroup(1 << 30, 1 << 30)
    refusal(
        shmload.load_pipeline,
        saved("flux"),
        shmload.MemoryLimitExceeded,
        "raise the container's memory limit",
    )


@pytest.mark.parametrize("keep", [False, True])
def test_pipeline_whose_shard_is_truncated_during_the_load(
    copied, before_decoding, shm_names, keep
):
    source = copied("flux")
    shard = shard_of(source, "transformer")
    before_decoding(lambda: os.truncate(shard, 100_000))
    refusal(shmload.load_pipeline, source, shmload.ShardTruncated, shard, keep=keep)
    assert shm_names() == []


def test_pipeline_whose_worker_is_killed_once(saved, workers_that):
    starts = workers_that(DIE_ONCE)
    source = saved("flux")
    pipe = shmload.load_pipeline(source, torch_dtype=torch.bfloat16)
    wanted = load_file(shard_of(source, "transformer"))
    for name, tensor in pipe.transformer.state_dict().items():
        assert torch.equal(tensor, wanted[name].bfloat16())
    assert starts() == 2


@pytest.mark.parametrize("keep", [False, True])
def test_pipeline_whose_workers_are_killed(saved, workers_that, shm_names, keep):
    starts = workers_that(DIE)
    refusal(shmload.load_pipeline, saved("flux"), shmload.WorkerError, "SIGKILL", keep=keep)
    assert starts() == 2
    assert shm_names() == []
