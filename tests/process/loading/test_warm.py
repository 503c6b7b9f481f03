"""`warm` makes sources resident once, and `plan` predicts what it will do."""

import json

import pytest
import torch
from warming import NBYTES, SHM

import shmload

# Warm ---------------------------------------------------------------------------------------------


def test_second_warm_reads_nothing_and_changes_nothing(folder, shm_names):
    first = shmload.warm(folder, torch_dtype=torch.bfloat16)
    assert first.source == str(folder)
    assert first.read_nbytes == NBYTES
    assert sorted(first.segments) == shm_names()
    assert first.resident_nbytes == sum((SHM / name).stat().st_size for name in shm_names())
    assert 0 <= first.times_s["read and cast"] < first.elapsed_s

    def written():
        return [(n, (SHM / n).stat().st_ino, (SHM / n).read_bytes()) for n in shm_names()]

    before = written()
    second = shmload.warm(folder, torch_dtype="bfloat16", progress=pytest.fail)
    assert second.read_nbytes == 0
    assert (second.segments, second.resident_nbytes) == (first.segments, first.resident_nbytes)
    assert written() == before


# Plan ---------------------------------------------------------------------------------------------


def test_plan_says_what_will_be_done_and_does_nothing(folder, shm_names):
    planned = shmload.plan(folder, torch_dtype=torch.bfloat16, keep=True)
    assert shm_names() == []
    assert planned.source == str(folder)
    # The middle shard has no floats to convert.
    assert [shard.conversion for shard in planned.shards] == ["BF16", "raw", "BF16"]
    assert {shard.action for shard in planned.shards} == {shmload.Action.DECODE}
    assert sum(shard.read_nbytes for shard in planned.shards) == NBYTES
    assert [shard.tensors for shard in planned.shards] == [1, 1, 1]
    report = shmload.warm(folder, torch_dtype=torch.bfloat16)
    assert report.segments == tuple(shard.segment for shard in planned.shards)
    assert planned.decode_nbytes == report.resident_nbytes
    after = shmload.plan(folder, torch_dtype=torch.bfloat16)
    assert {shard.action for shard in after.shards} == {shmload.Action.ATTACH}
    assert (after.decode_nbytes, after.resident_nbytes) == (0, report.resident_nbytes)


def test_keep_that_is_no_bool_is_refused(checkpoint):
    for door in (shmload.load_pipeline, shmload.load_state_dict, shmload.plan):
        with pytest.raises(shmload.ArgumentError, match=r"True or False; .*warm\(keep_for=\)"):
            door(checkpoint, keep="2h")


def test_command_goes_on_after_a_bad_source(checkpoint, tmp_path, command):
    code, printed, said = command("warm", "--json", tmp_path / "missing", checkpoint)
    failed, warmed = json.loads(printed)["reports"]
    assert code == 1
    assert "no such file" in failed["error"]
    assert len(warmed["segments"]) == 1
    assert said.count("\n") == 1
