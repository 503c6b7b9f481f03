"""`acquire` and `attach` return what a name refers to, even if another process acts in between."""

import os
import time

import pytest

from shmload._checkpoints.header import Header
from shmload._host.descriptors import try_lock
from shmload._host.shm import is_named, shm_unlink
from shmload._segments import part as building
from shmload._segments import removal
from shmload._segments import segment as attaching
from shmload._segments.layout import lay_out
from shmload._segments.lease import Lease
from shmload._segments.metadata import Metadata
from shmload._segments.names import part_name
from shmload._segments.part import Part, acquire
from shmload._segments.removal import remove_idle
from shmload._segments.segment import Segment, Stay, attach, peek

DIGEST = "1" * 32
LAYOUT = lay_out(
    Header(tensors=(), metadata=None, data_offset=8), lambda tensor: tensor.dtype, Metadata()
)


def build(name):
    """Make a segment as another process does; the caller closes it."""
    part = acquire(name)
    assert isinstance(part, Part)
    part.prepare(LAYOUT)
    return part.publish(DIGEST, Stay.RESIDENT)


@pytest.fixture
def before(monkeypatch):
    """Have another process act just before the next call of a function: `before(module, ...)`."""

    def plan(module, function, act):
        original = getattr(module, function)

        def call(*args, **kwargs):
            monkeypatch.setattr(module, function, original)
            act()
            return original(*args, **kwargs)

        monkeypatch.setattr(module, function, call)

    return plan


def test_segment_that_is_evicted_before_its_lock_is_taken_is_not_attached(name, before):
    build(name).close()
    before(attaching, "wait_lock", lambda: shm_unlink(name))
    assert attach(name) is None


def test_segment_that_is_published_before_its_part_is_opened_is_attached(name, before, shm_names):
    before(building, "shm_open", lambda: build(name).close())
    with acquire(name) as found:
        assert isinstance(found, Segment)
        assert found.has_name
    assert shm_names() == [name]


def test_part_that_is_removed_before_its_lock_is_taken_is_made_again(name, before, shm_names):
    before(building, "try_lock", lambda: shm_unlink(part_name(name)))
    with acquire(name) as found:
        assert isinstance(found, Part)
        assert is_named(found.fd, part_name(name))
    assert shm_names() == []


def test_neither_builder_nor_waiter_can_write_to_what_is_complete(name):
    part, awaited = acquire(name), acquire(name)
    part.prepare(LAYOUT)
    with part.publish(DIGEST, Stay.RESIDENT) as built, awaited.wait(10) as attached:
        for each in (built, attached):
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(each.fd, b"x", 0)
        for each in (built, attached):
            assert remove_idle([name]).used == [name]
            each.close()
    assert remove_idle([name]).idle == [name]


def test_name_that_is_another_segments_after_the_look_at_mappings_is_not_removed(name, before):
    build(name).close()

    def replace():
        shm_unlink(name)
        build(name).close()

    before(removal, "mappers", replace)
    assert remove_idle([name]).idle == []
    with attach(name) as found:
        assert found.has_name


def test_last_lease_that_ends_while_the_segment_is_listed_removes_it(name, before, shm_names):
    part = acquire(name)
    part.prepare(LAYOUT)
    with part.publish(DIGEST, Stay.SHARED) as segment:
        last = Lease(segment)
    listed = peek(name)
    before(removal, "remove_unused", lambda: try_lock(listed.fd, exclusive=True))
    before(time, "sleep", listed.close)  # in the wait for that lock
    last.close()
    assert shm_names() == []
