"""Faults of checkpoints raise the same errors through `load_pipeline`, and nothing is left."""

import json
import os

import pytest
import torch
from doors import refusal
from harm import DIE, append

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


def test_pipeline_that_is_none(checkpoint, folder):
    refusal(shmload.load_pipeline, folder, shmload.SourceNotFound, folder, "model_index.json")
    refusal(shmload.load_pipeline, checkpoint, shmload.ArgumentError, "pipeline_class")


@pytest.mark.parametrize("keep", [False, True])
def test_pipeline_whose_workers_are_killed(saved, workers_that, shm_names, keep):
    starts = workers_that(DIE)
    refusal(shmload.load_pipeline, saved("flux"), shmload.WorkerError, "SIGKILL", keep=keep)
    assert starts() == 2
    assert shm_names() == []
