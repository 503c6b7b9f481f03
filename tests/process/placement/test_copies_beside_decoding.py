"""Tensors are copied to their devices while others are decoded, and a failure leaves nothing."""

import gc
import threading

import pytest
import torch
from accelerated import assert_as_on_the_host_but_for_notes, load
from comparing import reference

import shmload
from shmload._devices import moves
from shmload._loading.load import Load
from shmload.workers.fill import Filler

pytestmark = pytest.mark.libraries


class Decode:
    """Holds the decode back at its last piece until the device has got a copy.

    Attributes:
        copied: set with the device's first copy.
        waited: whether the last piece came after that.
        error: raised by the last piece instead; None for none.
    """

    def __init__(self):
        self.copied = threading.Event()
        self.waited = None
        self.error = None


@pytest.fixture
def decode(monkeypatch, accelerators):
    """Decode in this process, one piece after the other, the last one behind a copy."""
    # As in large models, where the tensors that share an allocation are few.
    monkeypatch.setattr(moves, "_SLAB_NBYTES", 4096)
    monkeypatch.setattr(moves, "_LARGE_NBYTES", 2048)
    state = Decode()
    device = accelerators["cuda:0"]
    copy, fill, begin = device.copy, Filler.fill, Load._decode
    left = []

    def note_copy(*args):
        copy(*args)
        state.copied.set()

    def count_pieces(self, shards):
        left[:] = [sum(len(shard.layout.pieces) for shard in shards)]
        begin(self, shards)

    def fill_late(*args):
        left[0] -= 1
        if left[0] == 0:
            state.waited = state.copied.wait(5)
            if state.error:
                raise state.error
        return fill(*args)

    monkeypatch.setattr(device, "copy", note_copy)
    monkeypatch.setattr(Load, "_decode", count_pieces)
    monkeypatch.setattr(Filler, "fill", fill_late)
    return state


@pytest.mark.parametrize("how", [{"keep": True}, {"share": True}, {}], ids=["keep", "share", "own"])
def test_copies_begin_before_the_last_piece_is_decoded(saved, decode, evicts, how):
    source = saved("flux")
    got = load(source, device_map={"": 0}, **how)
    assert decode.waited
    assert_as_on_the_host_but_for_notes(got, reference(source, torch.bfloat16))


def test_decode_that_fails_behind_a_copy_leaves_nothing(saved, decode, accelerators, shm_names):
    decode.error = shmload.ShardTruncated("a file ended early")
    with pytest.raises(shmload.ShardTruncated):
        load(saved("flux"), device_map={"": 0}, keep=True)
    assert decode.waited
    assert shm_names() == []
    gc.collect()
    assert accelerators["cuda:0"].allocated == 0
    decode.error = None
    got = load(saved("flux"), device_map={"": 0})
    assert_as_on_the_host_but_for_notes(got, reference(saved("flux"), torch.bfloat16))


def test_copy_that_fails_ends_a_decode_that_is_under_way(saved, decode, accelerators, shm_names):
    accelerators["cuda:0"]._fails_at = 1
    with pytest.raises(torch.OutOfMemoryError):
        load(saved("flux"), device_map={"": 0}, keep=True)
    assert shm_names() == []
