"""`acquire` and `attach` return what a name refers to, even if another process acts in between."""

import mmap
import os
import stat

import pytest

from shmload._checkpoints.header import Header
from shmload._host.shm import is_named, shm_open, shm_rename, shm_unlink, write_at
from shmload._segments import part as building
from shmload._segments import removal
from shmload._segments import segment as attaching
from shmload._segments.layout import lay_out
from shmload._segments.metadata import DIGEST_OFFSET, Metadata
from shmload._segments.names import part_name
from shmload._segments.part import Awaited, Part, acquire
from shmload._segments.removal import remove_idle, remove_if_free
from shmload._segments.segment import READ_ONLY, Segment, Stay, attach
from shmload.errors import SegmentTimeout

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


class Clock:
    """Stands in for the module `time`; only `sleep` takes time."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


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


def test_builder_that_dies_before_the_segment_has_its_name_is_replaced(name, shm_names):
    builder = acquire(name)
    builder.prepare(LAYOUT)
    waiting = acquire(name)
    assert isinstance(waiting, Awaited)
    write_at(builder.fd, DIGEST.encode(), DIGEST_OFFSET)
    # What the kernel does when the builder is killed.
    os.close(builder.take())
    with waiting.wait(1.0) as found:
        assert isinstance(found, Part)
    assert shm_names() == []


def test_builder_that_is_killed_once_its_part_has_a_name_leaves_no_writable_segment(name):
    builder = acquire(name)
    builder.prepare(LAYOUT)
    waiting = acquire(name)
    assert isinstance(waiting, Awaited)
    write_at(builder.fd, DIGEST.encode(), DIGEST_OFFSET)
    shm_rename(part_name(name), name)
    os.close(builder.take())
    with waiting.wait(1.0) as found:
        assert stat.S_IMODE(os.fstat(found.fd).st_mode) == READ_ONLY


def test_builder_that_gives_up_is_replaced_even_while_its_part_is_mapped(name):
    builder = acquire(name)
    builder.prepare(LAYOUT)
    waiting = acquire(name)
    assert isinstance(waiting, Awaited)
    with mmap.mmap(builder.fd, 0):  # has a duplicate of the descriptor, and so of the lock
        builder.close()
        with waiting.wait(1.0) as found:
            assert isinstance(found, Part)


def test_deadline_of_a_wait_is_the_same_when_another_process_takes_over(name, before, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(building, "time", clock)
    builder = acquire(name)
    waiting = acquire(name)
    assert isinstance(waiting, Awaited)
    os.close(builder.take())
    others = []

    def take_over():
        clock.now = 0.5
        others.append(acquire(name))

    before(building, "acquire", take_over)
    with waiting, pytest.raises(SegmentTimeout):
        waiting.wait(1.0)
    assert 1.0 <= clock.now < 1.1
    for other in others:
        other.close()


def test_bytes_of_a_builder_that_died_are_dropped(name):
    builder = acquire(name)
    builder.prepare(LAYOUT)
    os.close(builder.take())
    with acquire(name) as found:
        assert os.fstat(found.fd).st_size == 0


def test_name_that_is_another_segments_after_the_look_at_mappings_is_not_removed(name, before):
    build(name).close()

    def replace():
        shm_unlink(name)
        build(name).close()

    before(removal, "mappers", replace)
    assert remove_idle([name]).idle == []
    with attach(name) as found:
        assert found.has_name


def test_name_that_is_another_segments_before_the_lock_is_taken_is_not_removed(name, before):
    build(name).close()

    def replace():
        shm_unlink(name)
        build(name).close()

    before(removal, "try_lock", replace)
    assert not remove_if_free(name)
    with attach(name) as found:
        assert found.has_name


@pytest.mark.parametrize("stay", [Stay.SHARED, Stay.RESIDENT])
def test_segment_has_its_digest_before_it_has_its_name(name, before, stay):
    part = acquire(name)
    part.prepare(LAYOUT)
    there = []

    def look():
        fd = shm_open(part_name(name))
        with Segment(name, fd) as segment:
            there.append(segment.read_metadata().digest)

    before(building, "shm_rename", look)
    part.publish(DIGEST, stay).close()
    assert there == [DIGEST]
