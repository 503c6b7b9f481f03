"""What processes pin is told by their shared mappings, and shared pages count once."""

import mmap
import os

import pytest

from shmload._cli.service import describe_page_locks
from shmload._host.descriptors import Inode
from shmload._host.memory import PAGE_NBYTES
from shmload._host.procfs import SharedRange
from shmload._segments import users as module
from shmload._segments.users import PageLock, PageLocks, page_lock_limit, page_locks

ONE, OTHER = Inode(1, 7), Inode(1, 8)


@pytest.mark.parametrize(
    ("found", "nbytes", "by_process"),
    [
        ({}, 0, {}),
        ({5: [SharedRange(ONE, 0, 10)], 3: [SharedRange(ONE, 0, 10)]}, 10, {3: 10, 5: 10}),
        ({5: [SharedRange(ONE, 0, 10)], 3: [SharedRange(ONE, 4, 20)]}, 20, {3: 16, 5: 10}),
        ({5: [SharedRange(ONE, 0, 10), SharedRange(OTHER, 0, 10)]}, 20, {5: 20}),
        (
            {5: [SharedRange(ONE, 0, 30), SharedRange(ONE, 5, 9), SharedRange(ONE, 29, 31)]},
            31,
            {5: 31},
        ),
    ],
)
def test_pages_of_several_processes_count_once(monkeypatch, found, nbytes, by_process):
    monkeypatch.setattr(module, "shared_ranges", lambda prefix, proc: found)
    locks = page_locks()
    assert locks.nbytes == nbytes
    assert {each.pid: each.nbytes for each in locks.processes} == by_process
    assert [each.pid for each in locks.processes] == sorted(by_process)


def test_mapping_of_this_process_is_found(fd):
    os.ftruncate(fd, 3 * PAGE_NBYTES)
    with mmap.mmap(fd, 2 * PAGE_NBYTES, mmap.MAP_SHARED, mmap.PROT_READ):
        assert page_locks().processes == (PageLock(pid=os.getpid(), nbytes=2 * PAGE_NBYTES),)
    assert page_locks() == PageLocks(nbytes=0, processes=())


def test_line_of_status():
    processes = (PageLock(pid=3, nbytes=1 << 30), PageLock(pid=5, nbytes=1 << 20))
    assert list(describe_page_locks(PageLocks(nbytes=1 << 30, processes=processes))) == [
        "page locks 1.00 GiB for devices: 1.00 GiB by process 3, 1.00 MiB by process 5"
    ]
    assert list(describe_page_locks(PageLocks(nbytes=0, processes=()))) == []


def test_limit_is_half_of_the_memory_or_what_is_set(configure, monkeypatch):
    machine = os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES
    monkeypatch.setattr(module, "cgroup_limit_nbytes", lambda: None)
    assert page_lock_limit() == machine // 2
    monkeypatch.setattr(module, "cgroup_limit_nbytes", lambda: 1 << 20)
    assert page_lock_limit() == 1 << 19
    configure(page_locked="3GiB")
    assert page_lock_limit() == 3 << 30
    configure(page_locked=0)
    assert page_lock_limit() == 0
