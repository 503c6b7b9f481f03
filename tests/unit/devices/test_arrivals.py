"""An allocation is complete with its last byte, whatever order and ranges the bytes come in."""

import itertools

import pytest
import torch
from devices import LateDevice
from torch import nn

from shmload._devices.moves import Moves
from shmload._devices.ring_copier import Arrivals

_LARGE = 600_000


@pytest.fixture
def tensors():
    """Two large tensors and two small ones of one storage, in this order of addresses."""
    flat = torch.zeros(2 * _LARGE + 300, dtype=torch.uint8)
    module = nn.Module()
    for name, begin, end in (
        ("first", 0, _LARGE),
        ("small", _LARGE, _LARGE + 100),
        ("second", _LARGE + 100, 2 * _LARGE + 100),
        ("smaller", 2 * _LARGE + 100, 2 * _LARGE + 300),
    ):
        module.register_buffer(name, flat[begin:end])
    device = LateDevice()
    return flat.data_ptr(), Moves([(module, lambda path: device)]).staged


def sizes(allocations):
    return [sum(move.nbytes for move in there.moves) for there in allocations]


def test_what_is_not_missing_is_ready(tensors):
    base, staged = tensors
    arrivals = Arrivals(staged, [(base, base + 10)])
    assert sizes(arrivals.ready) == [300, _LARGE]
    assert sizes(arrivals.rest) == [_LARGE]


def test_allocation_of_several_tensors_waits_for_the_last(tensors):
    base, staged = tensors
    end = base + 2 * _LARGE + 300
    arrivals = Arrivals(staged, [(base, end)])
    assert arrivals.ready == []
    assert arrivals.note(base, base + _LARGE - 1) == []
    assert sizes(arrivals.note(base + _LARGE - 1, base + _LARGE + 200)) == [_LARGE]
    assert sizes(arrivals.rest) == [300, _LARGE]
    assert sorted(sizes(arrivals.note(base + _LARGE + 200, end))) == [300, _LARGE]
    assert arrivals.rest == []


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_ranges_may_come_in_any_order(tensors, order):
    base, staged = tensors
    cuts = [base, base + 70, base + _LARGE + 50, base + _LARGE + 100_000, base + 2 * _LARGE + 300]
    arrivals = Arrivals(staged, [(cuts[0], cuts[-1])])
    complete = [each for part in order for each in arrivals.note(cuts[part], cuts[part + 1])]
    assert sorted(sizes(complete)) == [300, _LARGE, _LARGE]
    assert len(set(complete)) == 3


def test_range_that_comes_twice_counts_once(tensors):
    base, staged = tensors
    arrivals = Arrivals(staged, [(base, base + _LARGE)])
    for _ in range(3):
        assert arrivals.note(base, base + 10) == []
    assert sizes(arrivals.rest) == [_LARGE]
