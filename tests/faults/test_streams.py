"""Weights through a ring arrive right or the load fails, and nothing is left."""

import os

import pytest
from devices import LateDevice
from harm import DIE_ONCE, STOP_ONCE, overwrite
from safetensors.torch import load_file
from torch import nn
from warming import as_bf16, assert_same

import shmload
from shmload._checkpoints.resolve import resolve
from shmload._checkpoints.rule import Rule
from shmload._checkpoints.wanted import Wanted
from shmload._decoding.allowance import Bound
from shmload._devices.moves import Moves
from shmload._devices.upload import bring
from shmload._loading.load import Load
from shmload._loading.progress import Progress
from shmload._loading.state_dict import wrap
from shmload._segments.segment import Stay

BOUND = Bound(64 << 10, 192 << 10, None)


def stream(source, device, bound=BOUND):
    """Load a checkpoint onto a device as bfloat16, and return its tensors there."""
    found = resolve(Wanted(source=source), source)
    rules = {checkpoint.component: Rule(target="BF16") for checkpoint in found.checkpoints}
    with (
        Progress(None, "test") as progress,
        Load(found, rules, stay=Stay.PRIVATE, progress=progress, bound=bound) as load,
    ):
        module = nn.Module()
        for shard, held in load.holdings.opened():
            for key, tensor in wrap((held or shard).fd, shard.path.name).items():
                module.register_buffer(key, tensor)
        moves = Moves([(module, lambda path: device)])
        bring(moves, load, 192 << 10, load.holdings.descriptors())
        moves.commit()
    assert device.pending == 0
    assert not device.registered
    return dict(module.named_buffers())


def test_host_holds_no_more_than_the_bound(large, monkeypatch):
    held = []
    give_back = Load.give_back

    def note(load, piece):
        held.append(sum(os.fstat(p.fd).st_blocks * 512 for _, p in load.holdings.unfinished()))
        give_back(load, piece)

    monkeypatch.setattr(Load, "give_back", note)
    assert_same(stream(large, LateDevice()), as_bf16(load_file(large)))
    assert 0 < max(held) <= BOUND.ahead_nbytes + 4096  # and the header


@pytest.mark.slow
@pytest.mark.parametrize("harm", [DIE_ONCE, STOP_ONCE], ids=["killed", "stopped"])
def test_worker_that_is_lost_is_replaced(large, workers_that, harm):
    starts = workers_that(harm, stall_timeout_s=1)
    assert_same(stream(large, LateDevice()), as_bf16(load_file(large)))
    assert starts() == 2


def test_shard_that_is_overwritten_during_the_load_is_an_error(large, before_decoding):
    before_decoding(lambda: overwrite(large))
    device = LateDevice()
    with pytest.raises(shmload.ShardChanged):
        stream(large, device)
    assert device.pending == 0
