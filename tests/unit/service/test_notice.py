"""A notice says that a service runs exactly while its process has the lock."""

import contextlib
import os

import pytest

from shmload._host.shm import shm_open
from shmload._segments.names import lock_name, part_names
from shmload._segments.upkeep import collect_garbage
from shmload._service.notice import Notice, Status, service_status
from shmload.errors import SegmentUntrusted

STATUS = Status(pid=os.getpid(), started_at=1.0, budget_nbytes=5, to_preload=2)
NAME = lock_name("service")


def test_it_says_what_was_posted_last_until_it_is_closed():
    assert service_status() is None
    with Notice(STATUS) as notice:
        assert service_status() == STATUS
        last = Status(pid=1, started_at=2.0, budget_nbytes=1 << 60, preloaded=2)
        notice.post(last)
        assert service_status() == last
        notice.post(STATUS)  # is longer or shorter
        assert service_status() == STATUS
        assert NAME not in part_names()  # or loads would take it for a decode
        assert NAME not in collect_garbage()
    assert service_status() is None
    assert shm_open(NAME) is None


def test_that_of_a_dead_process_says_nothing_and_is_garbage():
    os.close(Notice(STATUS).take())  # as the kernel does when the process dies
    assert service_status() is None
    assert NAME in collect_garbage()


def test_file_that_others_may_open_is_no_notice():
    fd = shm_open(NAME, create=True, writable=True)
    with contextlib.ExitStack() as ending:
        ending.callback(os.close, fd)
        ending.callback(os.unlink, f"/dev/shm/{NAME}")
        os.fchmod(fd, 0o644)
        assert service_status() is None
        with pytest.raises(SegmentUntrusted):
            Notice(STATUS)
