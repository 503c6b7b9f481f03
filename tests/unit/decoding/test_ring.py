"""A ring has a shape that fits its limit, and each slot has one user at a time."""

import os
import select

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmload._decoding.ring import Ring, RingShape, ring_shape
from shmload.errors import ArgumentError


@given(st.integers(1, 64), st.one_of(st.none(), st.integers(8192, 1 << 40)))
def test_shape_keeps_the_limit_and_has_two_slots(fillers, max_nbytes):
    shape = ring_shape(fillers, max_nbytes)
    assert shape.slots >= 2
    assert shape.slot_nbytes > 0
    assert shape.slot_nbytes % 4096 == 0
    assert max_nbytes is None or shape.nbytes <= max_nbytes


def test_too_little_memory_is_refused():
    with pytest.raises(ArgumentError, match="two pages"):
        ring_shape(1, 8191)


def is_readable(fd):
    return bool(select.select([fd], [], [], 0)[0])


def test_slot_is_taken_once_until_it_is_given_back():
    with Ring(RingShape(2, 4096)) as ring:
        taken = {ring.take(), ring.take()}
        assert taken == {0, 4096}
        assert ring.take() is None
        assert not is_readable(ring.wake_fd)
        ring.give_back(4096)
        assert is_readable(ring.wake_fd)
        ring.rest()
        ring.rest()
        assert not is_readable(ring.wake_fd)
        assert ring.take() == 4096


def test_memory_is_what_the_descriptor_shows():
    with Ring(RingShape(2, 4096)) as ring:
        assert os.fstat(ring.fd).st_size == 8192
        os.pwrite(ring.fd, b"here", 4096)
        assert ring.memory[4096:4100] == b"here"


def test_reset_forgets_what_was_filled():
    with Ring(RingShape(2, 4096)) as ring:
        ring.take()
        ring.filled.put(None)
        ring.reset()
        assert ring.filled.empty()
        assert {ring.take(), ring.take()} == {0, 4096}


def test_close_may_come_again_and_before_the_last_slot_is_given_back():
    ring = Ring(RingShape(2, 4096))
    ring.take()
    ring.close()
    ring.close()
    ring.give_back(0)
