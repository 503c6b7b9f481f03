"""Faults of checkpoints raise the same errors through `load_pipeline`, and nothing is left."""

import os

import pytest
import torch
from doors import refusal
from harm import DIE

import shmload


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # the file itself is mapped
def test_pipeline_with_a_bad_file(copied, dtype):
    source = copied("flux", sharded=True)
    shard = min((source / "text_encoder").glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 1)
    refusal(shmload.load_pipeline, source, shmload.ShardTruncated, shard, torch_dtype=dtype)


def test_pipeline_that_is_none(checkpoint, folder):
    refusal(shmload.load_pipeline, folder, shmload.SourceNotFound, folder, "model_index.json")
    refusal(shmload.load_pipeline, checkpoint, shmload.ArgumentError, "pipeline_class")


@pytest.mark.parametrize("keep", [False, True])
def test_pipeline_whose_workers_are_killed(saved, workers_that, shm_names, keep):
    starts = workers_that(DIE)
    refusal(shmload.load_pipeline, saved("flux"), shmload.WorkerError, "SIGKILL", keep=keep)
    assert starts() == 2
    assert shm_names() == []
