"""Blocks whose weights wait compute with the right ones, copied in time and in the right order."""

import contextlib
import gc
import logging
import mmap
import os
import threading

import pytest
import torch
from devices import LateDevice
from memory_files import in_memory
from torch import nn

from shmload._devices import origin
from shmload._devices.origin import PageLimit, SegmentFiles
from shmload._devices.waiting import Waiting
from shmload._host.descriptors import inode_of
from shmload._runtimes.runtime import say_once

_SIZE = 64  # 16 KiB of float32 for each weight: blocks have pages of their own
_BLOCKS = 4


class Model(nn.Module):
    """Blocks of one layer each, over one file as a segment is mapped."""

    def __init__(self, fd):
        super().__init__()
        nbytes = _SIZE * _SIZE * 4
        content = mmap.mmap(fd, _BLOCKS * nbytes, access=mmap.ACCESS_COPY)
        self.blocks = nn.ModuleList()
        for number in range(_BLOCKS):
            layer = nn.Linear(_SIZE, _SIZE, bias=False)
            flat = torch.frombuffer(
                content, dtype=torch.float32, count=_SIZE * _SIZE, offset=number * nbytes
            )
            layer.weight = nn.Parameter(flat.view(_SIZE, _SIZE))
            self.blocks.append(layer)


@pytest.fixture
def segment():
    """A file with the weights of four blocks."""
    torch.manual_seed(0)
    with in_memory(torch.randn(_BLOCKS, _SIZE, _SIZE).numpy()) as fd:
        yield fd


@pytest.fixture
def device():
    device = LateDevice()
    yield device
    assert not device.registered
    assert device.pending == 0


@pytest.fixture
def limit(monkeypatch):
    """A limit of this test's own."""
    limit = PageLimit(1 << 30)
    monkeypatch.setattr(origin, "own_limit", lambda: limit)
    return limit


@pytest.fixture
def make(segment, device):
    """Return a function that makes a model, and what brings its blocks to a device."""
    made = []

    def make(device):
        model = Model(segment)
        waiting = Waiting(device)
        segments = SegmentFiles([(inode_of(os.fstat(segment)), segment)])
        for block in model.blocks:
            waiting.add(block, segments.origins(block.parameters()))
        made.append(waiting)
        return model, waiting

    yield make
    for waiting in made:
        waiting.release()


@pytest.fixture
def made(make, device):
    return make(device)


def run(model, waiting, order=range(_BLOCKS)):
    output = torch.ones(1, _SIZE)
    for number in order:
        with waiting.using(model.blocks[number]):
            output = model.blocks[number](output)
    return output


def plain(model, order=range(_BLOCKS)):
    """Compute the same without anything that waits."""
    output = torch.ones(1, _SIZE)
    for number in order:
        output = nn.functional.linear(output, model.blocks[number].weight.detach().clone())
    return output


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
@pytest.mark.parametrize("order", [range(_BLOCKS), (0, 2, 1, 3, 2, 0)])
def test_output_is_the_same(made, mode, order):
    model, waiting = made
    with mode():
        for _ in range(3):
            assert torch.equal(run(model, waiting, order), plain(model, order))


def test_memory_is_filled_only_behind_the_block_that_used_it(made, device):
    model, waiting = made
    calls = []

    def note(name, method):
        def call(*args):
            calls.append((name, args[0][0][0].data_ptr() if name == "copy" else None))
            return method(*args)

        return call

    for name in ("copy", "follow"):
        setattr(device, name, note(name, getattr(device, name)))
    used = {}
    with torch.no_grad():
        for number in (0, 1, 2, 3, 0, 1):
            with waiting.using(model.blocks[number]):
                used[len(calls)] = model.blocks[number].weight.data_ptr()
                calls.append(("compute", model.blocks[number].weight.data_ptr()))
    for at, (name, address) in enumerate(calls):
        before = [n for n in used if calls[n] == ("compute", address) and n < at]
        if name == "copy" and before:
            assert ("follow", None) in calls[max(before) : at]


@pytest.mark.parametrize("how", ["data", "in place", "new"])
def test_changed_weight_is_used(made, how):
    model, waiting = made
    with torch.no_grad():
        for number in (0, 2):  # the first is in a buffer already, for the next pass
            run(model, waiting)
            run(model, waiting)
            layer = model.blocks[number]
            if how == "data":
                layer.weight.data += 1  # torch does not count this change
            elif how == "in place":
                layer.weight.mul_(2)
            else:
                layer.weight = nn.Parameter(layer.weight * 3)
            assert torch.equal(run(model, waiting), plain(model))


def test_gradients_pass_through(made):
    model, waiting = made
    inputs = torch.ones(1, _SIZE, requires_grad=True)
    output = inputs
    for block in model.blocks:
        with waiting.using(block):
            output = block(output)
    with torch.no_grad():
        run(model, waiting)  # must not write over what autograd keeps
    output.sum().backward()
    wanted = torch.ones(1, _SIZE)
    for block in reversed(model.blocks):
        wanted = wanted @ block.weight.detach()
    assert torch.allclose(inputs.grad, wanted, rtol=1e-4)


def test_two_threads_may_call_the_same_blocks(made):
    model, waiting = made
    with torch.no_grad():
        wanted = plain(model)
    barrier = threading.Barrier(2)
    outputs = []

    def work():
        barrier.wait(20)
        with torch.no_grad():
            outputs.extend(run(model, waiting) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(outputs) == 100
    assert all(torch.equal(output, wanted) for output in outputs)


def test_what_the_budget_lacks_room_for_is_copied_without(make, device, monkeypatch, caplog):
    say_once.cache_clear()
    limit = PageLimit(2 * _SIZE * _SIZE * 4 + 4095)
    monkeypatch.setattr(origin, "own_limit", lambda: limit)
    model, waiting = make(device)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(run(model, waiting), plain(model))
    assert limit.taken_nbytes == 2 * _SIZE * _SIZE * 4
    assert len(caplog.records) == 1
    del model.blocks[0]
    gc.collect()
    with torch.no_grad():  # its room is another block's now
        run(model, waiting, range(_BLOCKS - 1))
    assert limit.taken_nbytes == 2 * _SIZE * _SIZE * 4
    waiting.release()
    assert limit.taken_nbytes == 0


def test_a_registration_takes_no_more_than_a_window(make, device, monkeypatch):
    assert origin._WINDOW_NBYTES == 1 << 30  # beyond 512 times that the driver fails
    monkeypatch.setattr(origin, "_WINDOW_NBYTES", mmap.PAGESIZE)
    model, waiting = make(device)
    with torch.no_grad():
        assert torch.equal(run(model, waiting), plain(model))
    sizes = list(device.registered.values())
    assert max(sizes) == mmap.PAGESIZE
    assert sum(sizes) == _BLOCKS * _SIZE * _SIZE * 4


# Errors of the device -----------------------------------------------------------------------------


def test_device_with_room_for_one_block_computes_all(make, device):
    model, waiting = make(device)
    device.room = _SIZE * _SIZE * 4 * 3 // 2
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(run(model, waiting), plain(model))


@pytest.mark.parametrize("fails", ["copy", "empty", "join"])
def test_copies_end_before_their_memory_is_freed(segment, device, monkeypatch, fails):
    """With gradients on, where each pass has memory of its own."""

    def fail(*args):
        nonlocal pending
        pending = max(pending, device.pending)
        raise error

    def copy_or_fail(*args):
        return fail() if device.pending else start(*args)

    model, waiting = Model(segment), Waiting(device)
    segments = SegmentFiles([(inode_of(os.fstat(segment)), segment)])
    waiting.add(model, segments.origins(model.parameters()))
    model.other = nn.Linear(1, 1)  # in no segment: it goes through slots
    error, pending = torch.OutOfMemoryError("full"), 0
    start, empty = device.copy, device.empty
    with monkeypatch.context() as failing:
        if fails == "copy":
            failing.setattr(device, "copy", copy_or_fail)
        elif fails == "empty":
            failing.setattr(device, "empty", lambda n: fail() if device.pending else empty(n))
        else:
            failing.setattr(device, "join", fail)
        with pytest.raises(torch.OutOfMemoryError), waiting.using(model):
            pytest.fail("it is not entered")
    assert pending
    assert device.pending == 0
    assert all(parameter.is_leaf for parameter in model.parameters())
    waiting.release()
