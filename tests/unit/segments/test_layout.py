"""A segment's layout holds every byte once, aligned and in pieces, and safetensors reads it."""

import contextlib
import itertools
import os

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_files import in_memory

from shmload._checkpoints.dtypes import FLOATS, NBITS, TORCH_NAMES
from shmload._checkpoints.formats.safetensors import build_header, read_header
from shmload._checkpoints.header import Header, TensorSpec
from shmload._host.memory import PAGE_NBYTES
from shmload._host.reading import Reading
from shmload._segments import pieces
from shmload._segments.layout import lay_out
from shmload._segments.metadata import (
    DIGEST_OFFSET,
    Metadata,
    header_entries,
    make_metadata,
    read_metadata,
)
from shmload._segments.pieces import combine_digests
from shmload._segments.upkeep import digest_data
from shmload.workers.fill import Filler

_NO_METADATA = Metadata()
_PIECE_NBYTES = 256  # instead of 64 MiB, to split small tensors too
_DTYPES = sorted(name for name in TORCH_NAMES if NBITS[name] >= 8)
_shapes = st.lists(st.integers(0, 40), max_size=2)
_tensors = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6),
    st.tuples(st.sampled_from(_DTYPES), _shapes),
    max_size=8,
)
_targets = st.sampled_from([None, "F32", "BF16", "F16", "F8_E4M3", "F64"])


def make_tensors(described):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (dtype, shape) in described.items():
        kind = getattr(torch, TORCH_NAMES[dtype])
        values = torch.randn(shape, generator=generator)
        if dtype == "BOOL":
            values = values > 0
        elif dtype not in FLOATS and dtype != "C64":
            values = values.abs() * 9
        tensors[name] = values.to(kind)
    return tensors


def converting(target, exceptions=()):
    """Make a rule: all floats become `target`, except tensors of some names."""

    def dtype_of(tensor):
        if target is None or tensor.dtype not in FLOATS or tensor.name in exceptions:
            return tensor.dtype
        return target

    return dtype_of


@contextlib.contextmanager
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_NBYTES", _PIECE_NBYTES)
        yield


def lay_out_file(fd, dtype_of, metadata=_NO_METADATA):
    return lay_out(read_header(fd, "model.safetensors"), dtype_of, metadata)


@given(
    _tensors,
    _targets,
    st.sets(st.text("abc.", min_size=1, max_size=2)),
    st.sampled_from([0, 2]),
)
def test_filled_segment_is_read_by_safetensors_as_torchs_conversion(
    described, target, exceptions, readers
):
    tensors = make_tensors(described)
    with small_pieces(), in_memory(safetensors.torch.save(tensors)) as source, in_memory() as fd:
        layout = lay_out_file(source, converting(target, exceptions), Metadata(source="here"))
        os.ftruncate(fd, layout.nbytes)
        os.pwrite(fd, layout.header, 0)
        shard = Reading(source, readers)
        with contextlib.closing(Filler()) as filler:
            digests = [filler.fill(shard, fd, piece, lambda _: None) for piece in layout.pieces]
        # The digest from the worker equals the digest that `verify` computes from the segment.
        header = read_header(fd, "segment")
        assert digest_data(fd, header) == combine_digests(digests)
        # safetensors.torch.load lacks some dtypes.
        found = dict(safetensors.deserialize(os.pread(fd, layout.nbytes, 0)))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if target and tensor.is_floating_point() and name not in exceptions:
            tensor = tensor.to(getattr(torch, TORCH_NAMES[target]))
        assert tuple(found[name]["shape"]) == tensor.shape
        assert TORCH_NAMES[found[name]["dtype"]] == str(tensor.dtype).removeprefix("torch.")
        assert bytes(found[name]["data"]) == bytes(tensor.reshape(-1).view(torch.uint8).numpy())


@given(_tensors, _targets)
def test_tensors_are_aligned(described, target):
    with in_memory(safetensors.torch.save(make_tensors(described))) as fd:
        layout = lay_out_file(fd, converting(target))
    assert len(layout.header) % PAGE_NBYTES == 0
    with in_memory(layout.header.ljust(layout.nbytes, b"\0")) as fd:
        for spec in read_header(fd, "segment").tensors:
            assert spec.begin * 8 % NBITS[spec.dtype] == 0
            if spec.nbytes % 64 == 0:
                assert spec.begin % 64 == 0


def scatter(header, at_random):
    """Return the header of the same tensors in random order with gaps, listed in another order."""
    specs, end = [], 0
    for spec in at_random.sample(header.tensors, len(header.tensors)):
        begin = end + at_random.choice([0, 0, 1, 3, 64])
        end = begin + spec.nbytes
        specs.append(TensorSpec(spec.name, spec.dtype, spec.shape, begin, end))
    at_random.shuffle(specs)
    return Header(tensors=tuple(specs), metadata=header.metadata, data_offset=0)


@given(_tensors, _targets, st.randoms(use_true_random=False))
def test_shard_is_read_forwards_whatever_the_order_of_its_header(described, target, at_random):
    with in_memory(safetensors.torch.save(make_tensors(described))) as fd:
        header = scatter(read_header(fd, "shard"), at_random)
    layout = lay_out(header, converting(target), Metadata())
    in_order = sorted(header.tensors, key=lambda spec: (spec.begin, spec.end))
    ordered = Header(tensors=tuple(in_order), metadata=header.metadata, data_offset=0)
    assert layout.pieces == lay_out(ordered, converting(target), Metadata()).pieces
    # One pass over the file for each alignment, from 64 bytes down to 1.
    offsets = [run.source_offset for piece in layout.pieces for run in piece]
    assert sum(after < before for before, after in itertools.pairwise(offsets)) <= 6


def test_segment_as_a_source_does_not_describe_the_new_segment():
    old = header_entries(make_metadata("old.safetensors", "old identity", "BF16"), None)
    new = make_metadata("new.safetensors", "new identity", "raw")
    with in_memory(safetensors.torch.save({"shmload": torch.ones(3)}, old)) as fd:
        layout = lay_out_file(fd, converting(None), new)
    with in_memory(layout.header.ljust(layout.nbytes, b"\0")) as fd:
        os.pwrite(fd, b"e" * 32, DIGEST_OFFSET)
        found = read_metadata(fd)
    assert (found.source, found.identity) == ("new.safetensors", "new identity")
    assert (found.conversion, found.digest) == ("raw", "e" * 32)


def read_back(layout):
    with in_memory(layout.header.ljust(layout.nbytes, b"\0")) as fd:
        return read_metadata(fd)


@pytest.mark.parametrize("source", ["ä.safetensors", '"\\x".safetensors', "\udcff" * 4090])
def test_metadata_is_read_without_the_tensors(source):
    new = make_metadata(source, "identity", "raw")
    tensors = {f"{n}": torch.ones(3, dtype=torch.bfloat16) for n in range(1000)}
    own = {"long": "x" * 100_000}
    with in_memory(safetensors.torch.save(tensors | {"a": torch.ones(2)}, own)) as fd:
        found = read_back(lay_out_file(fd, converting(None), new))
    assert found == msgspec.structs.replace(new, dtype="bfloat16")
    assert found.source == source
    with in_memory(safetensors.torch.save(tensors)) as fd:
        to_half = msgspec.structs.replace(new, conversion="F16/x")
        assert read_back(lay_out_file(fd, converting("F16"), to_half)).dtype == "float16"


@pytest.mark.parametrize("harm", [("created_at", "created_as"), ("00000", "never"), ("}", " ")])
def test_metadata_that_is_damaged_is_none(harm):
    entries = header_entries(make_metadata("a", "identity", "raw"), None)
    old, new = (text.encode() for text in harm)
    raw = build_header((), entries, 8).replace(old, new.rjust(len(old)), 1)
    with in_memory(raw) as fd:
        found = read_metadata(fd)
    assert found is None or found.created_at == 0
