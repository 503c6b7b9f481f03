"""A lent shard is decoded within its part's length, or refused before it is read."""

import os
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._checkpoints.dtypes import NBITS
from shmload._decoding.job import Job, require_sound
from shmload._segments.pieces import Run
from shmload._service.protocol import Stat
from shmload.errors import ArgumentError, ProcessLimitExceeded
from shmload.workers.fill import Filler
from shmload.workers.reader import Source

_NBYTES = 64


@pytest.fixture(scope="module")
def fds():
    """A shard of zeros, a part of ones."""
    found = os.memfd_create("shard"), os.memfd_create("part")
    os.truncate(found[0], _NBYTES)
    yield found
    for fd in found:
        os.close(fd)


def job(fds, pieces):
    os.pwrite(fds[1], b"\1" * _NBYTES, 0)
    return Job(
        path="the shard",
        source_fd=fds[0],
        source=Stat(_NBYTES, 1, 1, 1),
        part_fd=fds[1],
        nbytes=_NBYTES,
        pieces=pieces,
    )


_places = st.integers(-1, _NBYTES + 1)
_dtypes = st.sampled_from(["U8", "U8", "I64", "F64", "F32", "BF16", "F8_E4M3", "F4", "F7", ""])
_runs = st.builds(Run, _places, _places, st.integers(-1, 20), _dtypes, _dtypes)
_copies = st.builds(Run, _places, _places, st.integers(1, 9), st.just("U8"), st.just("U8"))


@given(st.lists(st.lists(_runs | _copies, max_size=2).map(tuple), max_size=2).map(tuple))
def test_what_is_not_refused_is_filled_once_and_nothing_else(fds, pieces):
    lent = job(fds, pieces)
    try:
        require_sound(lent)
    except ArgumentError:
        return
    for runs in pieces:
        Filler().fill(Source(fds[0]), fds[1], runs, lambda nbytes: None)
    written = os.pread(fds[1], 2 * _NBYTES, 0)
    assert len(written) == _NBYTES
    filled = (run.count * NBITS[run.target] // 8 for runs in pieces for run in runs)
    assert written.count(0) == sum(filled)


UNSOUND = {
    "beyond the part": [(0, 1, _NBYTES, "U8", "U8")],
    "beyond the shard": [(1, 0, _NBYTES, "U8", "U8")],
    "wider than the part": [(0, 0, _NBYTES // 2, "BF16", "F32")],
    "below zero in the shard": [(-1, 0, 1, "U8", "U8")],
    "below zero in the part": [(0, -1, 1, "U8", "U8")],
    "no elements": [(0, 0, 0, "U8", "U8")],
    "fewer than none": [(8, 8, -1, "U8", "U8")],
    "above 64 bits": [(0, 0, 2**64 - 1, "F64", "F64")],
    "offsets of 64 bits": [(2**64 - 1, 2**64 - 1, 1, "U8", "U8")],
    "overlapping": [(0, 0, 8, "U8", "U8"), (0, 7, 8, "U8", "U8")],
    "the wrong way round": [(0, 8, 8, "U8", "U8"), (0, 0, 8, "U8", "U8")],
    "unknown dtype": [(0, 0, 1, "F7", "F7")],
    "half a byte": [(0, 0, 8, "F4", "F4")],
    "no conversion": [(0, 0, 1, "I64", "F32")],
    "empty": [],
}


@pytest.mark.parametrize("runs", UNSOUND.values(), ids=UNSOUND)
def test_unsound_piece_is_refused_with_the_shards_name(fds, runs):
    piece = tuple(Run(*run) for run in runs)
    with pytest.raises(ArgumentError, match="the shard"):
        require_sound(job(fds, (piece,)))


def test_pieces_that_overlap_are_refused(fds):
    piece = (Run(0, 0, 8, "U8", "U8"),)
    with pytest.raises(ArgumentError):
        require_sound(job(fds, (piece, piece)))


def test_part_that_a_limit_forbids_the_service_to_write(fds):
    lent = job(fds, ())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (_NBYTES - 1, before[1]))
    try:
        with pytest.raises(ProcessLimitExceeded, match="RLIMIT_FSIZE lets the service write") as it:
            require_sound(lent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (it.value.limit, it.value.path) == ("RLIMIT_FSIZE", "the shard")
