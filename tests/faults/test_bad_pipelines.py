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
    (path,) = (source / component).glob("*.safetensors")
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["decoded", "mapped"])
@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
def test_pipeline_with_a_truncated_shard(copied, component, dtype):
    source = copied("flux")
    shard = shard_of(source, component)
    os.truncate(shard, shard.stat().st_size - 1)
    refusal(shmload.load_pipeline, source, shmload.ShardTruncated, shard, torch_dtype=dtype)


def test_pipeline_with_a_lying_header(copied):
    source = copied("flux")
    shard = shard_of(source, "vae")
    append(shard)
    refusal(
        shmload.load_pipeline, source, shmload.ShardMalformed, shard, torch_dtype=torch.bfloat16
    )


def test_pipeline_with_a_missing_shard(copied):
    source = copied("flux", sharded=True)
    shard = sorted((source / "transformer").glob("*.safetensors"))[1]
    shard.unlink()
    refusal(shmload.load_pipeline, source, shmload.ShardMissing, shard, torch_dtype=torch.bfloat16)


def test_pipeline_with_an_index_that_points_outside(copied):
    source = copied("flux", sharded=True)
    (index,) = (source / "transformer").glob("*.index.json")
    content = json.loads(index.read_text())
    content["weight_map"] = dict.fromkeys(content["weight_map"], "../vae/other.safetensors")
    index.write_text(json.dumps(content))
    refusal(
        shmload.load_pipeline, source, shmload.IndexMalformed, index, torch_dtype=torch.bfloat16
    )


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
        torch_dtype=torch.bfloat16,
    )


@pytest.mark.parametrize("keep", [False, True])
def test_pipeline_whose_shard_is_truncated_during_the_load(
    copied, before_decoding, shm_names, keep
):
    source = copied("flux")
    shard = shard_of(source, "transformer")
    before_decoding(lambda: os.truncate(shard, 100_000))
    refusal(
        shmload.load_pipeline,
        source,
        shmload.ShardTruncated,
        shard,
        torch_dtype=torch.bfloat16,
        keep=keep,
    )
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
    refusal(
        shmload.load_pipeline,
        saved("flux"),
        shmload.WorkerDied,
        "SIGKILL",
        torch_dtype=torch.bfloat16,
        keep=keep,
    )
    assert starts() == 2
    assert shm_names() == []
