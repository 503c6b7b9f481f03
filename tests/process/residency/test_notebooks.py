"""What a notebook shows, and what its errors say of weights that it holds itself."""

import gc

import pytest
import torch
from safetensors.torch import save_file

import shmload
from shmload._segments import eviction


@pytest.fixture
def single_shard(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.zeros(8)}, path)
    return path


@pytest.mark.parametrize("keep", [True, False])
def test_lack_of_room_says_that_this_process_holds_some(single_shard, evicts, monkeypatch, keep):
    state = shmload.load_state_dict(single_shard, "float16", keep=keep)
    monkeypatch.setattr(eviction, "shm_free_nbytes", lambda: 100)
    with pytest.raises(shmload.SharedMemoryFull, match="leaves 100 B; ") as caught:
        shmload.load_state_dict(single_shard, keep=True)
    assert state
    assert "drop its models, call `gc.collect()`" in caught.value.__notes__[0]


def test_reports_and_lists_are_shown_as_the_command_line_shows_them(single_shard, evicts):
    report = shmload.warm(single_shard, dtype="float16")
    line = str(report)
    assert line.startswith(f"{single_shard}: 4.02 KiB resident in 1 segment, 32 B read in 0.")
    assert str(shmload.warm(single_shard, dtype="float16")).endswith(": already resident, 4.02 KiB")
    state = shmload.load_state_dict(single_shard, "float16", keep=True)
    assert f"in use  {single_shard}" in str(shmload.segments())
    del state
    gc.collect()
    for function in (shmload.pin, shmload.unpin, shmload.verify, shmload.evict):
        assert str(function(single_shard)).startswith("MODEL")
