"""A load whose files change while they are read fails, and its bytes are never served."""

import os

import pytest
import torch
from doors import decoding_door, refusal
from harm import CHANGES
from safetensors.torch import load_file, save_file

import shmload


def once(action):
    """Make a progress callback that calls `action` once, at its first call."""
    is_done = []

    def report(done, total):
        if not is_done:
            is_done.append(True)
            assert done < total
            action()

    return report


@decoding_door
def test_shard_truncated_in_the_middle(large, door):
    size = large.stat().st_size
    error = refusal(
        door,
        large,
        shmload.ShardTruncated,
        large,
        "download it again",
        progress=once(lambda: os.truncate(large, 20_000_001)),
    )
    assert (error.wanted, error.got) == (size, 20_000_001)


@pytest.mark.parametrize("change", CHANGES)
@decoding_door
def test_shard_changed_in_the_middle(large, door, change):
    refusal(
        door, large, shmload.ShardChanged, large, "load again", progress=once(lambda: change(large))
    )


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 30])
@pytest.mark.parametrize("change", CHANGES)
def test_shard_changed_between_its_header_and_its_weights(
    checkpoint, configure, before_decoding, change, inline_nbytes
):
    # Between plan and decode much time may pass, for example if another decoder died.
    configure(inline_nbytes=inline_nbytes, workers=1)
    before_decoding(lambda: change(checkpoint))
    refusal(shmload.warm, checkpoint, shmload.ShardChanged, checkpoint, "load again")


@pytest.mark.parametrize("moment", ["before", "in the middle"])
def test_shard_replaced_during_the_load_gives_the_old_bytes_and_is_not_served_as_the_new(
    large, before_decoding, evicts, moment
):
    old = load_file(large)["a"].bfloat16()
    fresh = large.with_suffix(".new")
    save_file({"a": torch.ones(10_000_000)}, fresh)
    progress = None
    if moment == "before":
        before_decoding(lambda: fresh.exists() and fresh.replace(large))
    else:
        progress = once(lambda: fresh.replace(large))
    state = shmload.load_state_dict(large, torch.bfloat16, keep=True, progress=progress)
    assert torch.equal(state["a"], old)
    assert [info.is_current for info in shmload.segments()] == [False]
    again = shmload.load_state_dict(large, torch.bfloat16)
    assert again["a"].eq(1).all()
