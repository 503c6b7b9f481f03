"""The slices of all ranks together are the tensor, split as torch splits it."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from shmload._sharding.weights import Split, divide, slice_of
from shmload.integrations import zero

SHAPES = st.lists(st.integers(0, 9), min_size=1, max_size=3)
COUNTS = st.integers(1, 5)


def numbered(shape):
    return torch.arange(math.prod(shape)).view(shape)


@given(st.integers(1, 40), COUNTS)
def test_chunks_are_those_of_torch(size, count):
    row = torch.arange(size)
    parts = [row[begin : begin + n] for begin, n in (divide(size, count, i) for i in range(count))]
    wanted = list(row.chunk(count))
    assert [part.tolist() for part in parts if part.numel()] == [w.tolist() for w in wanted]
    assert all(not part.numel() for part in parts[len(wanted) :])


@given(SHAPES, COUNTS, st.data())
def test_shards_of_one_dimension_make_the_tensor(shape, count, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    tensor = numbered(shape)
    parts = [tensor[slice_of(shape, [Split(dim, count, i)])] for i in range(count)]
    assert torch.equal(torch.cat(parts, dim), tensor)
    assert all(part.untyped_storage().data_ptr() == tensor.data_ptr() for part in parts)


@given(SHAPES, st.data())
def test_regions_are_where_dtensor_has_them(shape, data):
    mesh = data.draw(st.lists(COUNTS, min_size=1, max_size=3))
    dims = [data.draw(st.none() | st.integers(0, len(shape) - 1)) for _ in mesh]
    placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
    for place in itertools.product(*map(range, mesh)):
        splits = [
            Split(dim, count, index)
            for dim, count, index in zip(dims, mesh, place, strict=True)
            if dim is not None
        ]
        got = slice_of(shape, splits)
        sizes, offsets = _compute_local_shape_and_global_offset(
            tuple(shape), tuple(mesh), list(place), placements
        )
        assert tuple(part.stop - part.start for part in got) == tuple(sizes)
        if math.prod(sizes):
            assert tuple(part.start for part in got) == tuple(offsets)


def test_fsdp_over_tensor_parallelism_divides_what_that_has_left():
    # A 2 x 2 mesh: the second dimension splits the rows first, then the first splits each result.
    def rows(data_rank, tensor_rank):
        splits = [Split(0, 2, data_rank, shards=2), Split(0, 2, tensor_rank)]
        return numbered([8])[slice_of([8], splits)].tolist()

    assert rows(0, 0) == [0, 1]
    assert rows(1, 0) == [2, 3]
    assert rows(0, 1) == [4, 5]
    assert rows(1, 1) == [6, 7]


@given(st.integers(0, 30), COUNTS, COUNTS)
def test_uneven_regions_of_two_levels_are_disjoint_and_complete(size, outer, inner):
    found = []
    for data_rank, tensor_rank in itertools.product(range(outer), range(inner)):
        splits = [Split(0, outer, data_rank, shards=inner), Split(0, inner, tensor_rank)]
        found += numbered([size])[slice_of([size], splits)].tolist()
    assert sorted(found) == list(range(size))


def test_replicas_have_the_whole_tensor():
    assert slice_of([3, 4], []) == (slice(0, 3), slice(0, 4))
    assert slice_of([], []) == ()


def test_splits_that_say_nothing_sensible_are_refused():
    with pytest.raises(ValueError, match="2 shards and not 4"):
        slice_of([8], [Split(0, 2, 0, shards=4), Split(0, 2, 0)])
    for dim in (1, -1):
        with pytest.raises(ValueError, match="no dimension"):
            slice_of([8], [Split(dim, 2, 0)])


def parts_of(tensor, count):
    """Return the parts of all ranks of a module's one parameter, as ZeRO-3 divides it."""
    for rank in range(count):
        module = torch.nn.ParameterList([torch.nn.Parameter(tensor, requires_grad=False)])
        yield zero.partition(module, rank, count)["0"]


@given(SHAPES | st.just([]), COUNTS)
def test_parts_are_equally_long_and_make_the_tensor(shape, count):
    tensor = numbered(shape)
    parts = list(parts_of(tensor, count))
    assert torch.equal(parts[0].assemble(torch.cat([part.tensor for part in parts])), tensor)
    assert {part.tensor.numel() for part in parts} == {math.ceil(tensor.numel() / count)}


def test_padding_may_fill_whole_parts():
    found = [(part.begin, part.padding) for part in parts_of(numbered([2]), 4)]
    assert found == [(0, 0), (1, 0), (2, 1), (2, 1)]
