"""A part's name that goes while it is filled is an error of ours, and never another load's part."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from warming import as_bf16, assert_same

import shmload
from shmload._host.shm import is_named
from shmload._segments.names import part_name
from shmload._segments.part import acquire
from shmload.errors import SegmentError

_SHM = Path("/dev/shm")


@pytest.fixture
def segment(checkpoint):
    """The name of the segment that the checkpoint gets."""
    return shmload.plan(checkpoint, dtype="bfloat16", keep=True).shards[0].segment


def test_what_was_to_stay_is_an_error(checkpoint, segment, before_decoding, shm_names):
    before_decoding((_SHM / part_name(segment)).unlink)
    with pytest.raises(SegmentError, match=r"RemoveIPC= .*enable-linger") as caught:
        shmload.warm(checkpoint, dtype="bfloat16")
    assert str(caught.value).startswith(f"/dev/shm/{part_name(segment)} was removed while")
    assert shm_names() == []


def test_private_load_needs_no_name(checkpoint, segment, before_decoding, shm_names):
    before_decoding((_SHM / part_name(segment)).unlink)
    assert_same(shmload.load_state_dict(checkpoint, "bfloat16"), as_bf16(load_file(checkpoint)))
    assert shm_names() == []


def test_part_that_another_load_has_begun_meanwhile_is_left_to_it(
    checkpoint, segment, before_decoding
):
    begun = []

    def begin_anew():
        (_SHM / part_name(segment)).unlink()
        begun.append(acquire(segment))

    before_decoding(begin_anew)
    assert_same(shmload.load_state_dict(checkpoint, "bfloat16"), as_bf16(load_file(checkpoint)))
    (part,) = begun
    assert is_named(part.fd, part_name(segment))
    assert shmload.segments() == []
    part.close()
