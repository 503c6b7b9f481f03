"""Tensors of a segment are joined without a copy where that is possible."""

import mmap
import os

import pytest
import torch
from comparing import as_bytes
from memory_files import in_memory

from shmload._building.blocks_maker import Joins
from shmload._building.mapped import is_in
from shmload._host.descriptors import inode_of
from shmload._host.memory import PAGE_NBYTES
from shmload._host.procfs import mappings_of


@pytest.fixture
def segment():
    """The descriptor of a file of eight pages."""
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(0, 256, (8 * PAGE_NBYTES,), dtype=torch.uint8, generator=generator)
    with in_memory(content.numpy()) as fd:
        yield fd


@pytest.fixture
def whole(segment):
    mapped = mmap.mmap(segment, 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8).view(128, -1)


def is_mapped(tensor, segment):
    return is_in(mappings_of({inode_of(os.fstat(segment))}), tensor)


def test_one_contiguous_tensor_stays_where_it_is(segment, whole):
    with Joins(segment):
        joined = torch.cat([whole[64:]])
    assert joined.data_ptr() == whole[64:].data_ptr()


def test_halves_are_exchanged_by_mappings(segment, whole):
    first, second = whole.chunk(2)
    with Joins(segment):
        joined = torch.cat([second, first])
    assert is_mapped(joined, segment)
    assert as_bytes(joined) == as_bytes(torch.cat([second, first]))
    assert (joined.shape, joined.stride()) == (whole.shape, whole.stride())
    joined[0, 0] += 1  # copy-on-write
    assert joined[0, 0] != whole[64, 0]
    floats = whole.view(torch.bfloat16)
    with Joins(segment):
        joined = torch.cat([floats[64:], floats[:64]])
    assert is_mapped(joined, segment)
    assert as_bytes(joined) == as_bytes(torch.cat([floats[64:], floats[:64]]))


COPIES = {
    "side by side": lambda t: torch.cat([t[:64], t[64:]], dim=1),
    "not whole pages": lambda t: torch.cat([t[100:], t[:100]]),
    "not on a page": lambda t: torch.cat([t[1:65], t[65:]]),
    "columns": lambda t: torch.cat([t[:, :8]]),
    "of another memory": lambda t: torch.cat([t[64:], torch.zeros_like(t[:64])]),
    "empty": lambda t: torch.cat([t[64:], t[:0]]),
    "stacked": lambda t: torch.stack([t[64:], t[:64]]),
}


@pytest.mark.parametrize("join", COPIES.values(), ids=COPIES)
def test_others_are_copied_as_ever(segment, whole, join):
    with Joins(segment):
        joined = join(whole)
    assert not is_mapped(joined, segment)
    wanted = join(whole)
    assert (joined.shape, joined.stride()) == (wanted.shape, wanted.stride())
    assert as_bytes(joined) == as_bytes(wanted)


def test_what_was_written_is_copied(segment, whole):
    whole[3, 3] += 1
    with Joins(segment):
        joined = torch.cat([whole[64:], whole[:64]])
    assert as_bytes(joined) == as_bytes(torch.cat([whole[64:], whole[:64]]))
