"""The kernel tells which pages this process has read, and which it has written."""

import errno
import mmap
import os

import pytest

from shmload._host import memory
from shmload._host.descriptors import inode_of
from shmload._host.memory import PAGE_NBYTES, has_own_pages, is_touched
from shmload._host.procfs import mappings


@pytest.fixture(params=["ioctl", "entries"], autouse=True)
def way(request, monkeypatch):
    """The kernel answers as one does since Linux 6.7, or as earlier ones do."""
    if request.param == "entries":

        def refuse(*_):
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

        monkeypatch.setattr(memory, "_scan", refuse)
    elif tuple(map(int, os.uname().release.split(".")[:2])) < (6, 7):
        pytest.skip("this kernel has no PAGEMAP_SCAN")
    else:
        # It does not fall back.
        monkeypatch.setattr(memory, "_is_listed", None)
    return request.param


@pytest.mark.parametrize("page", [0, 100, 255])
def test_page_that_was_written_to_is_this_processs_own(fd, page):
    os.ftruncate(fd, 256 * PAGE_NBYTES)
    os.pwrite(fd, b"\1" * 256 * PAGE_NBYTES, 0)
    with mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as mapped:
        (mapping,) = mappings({inode_of(os.fstat(fd))})
        assert not has_own_pages(mapping.start, mapping.end)
        assert sum(mapped[::PAGE_NBYTES]) == 256
        assert not has_own_pages(mapping.start, mapping.end)  # reading makes none
        mapped[page * PAGE_NBYTES] = 2
        assert has_own_pages(mapping.start, mapping.end)
        at = mapping.start + page * PAGE_NBYTES
        assert has_own_pages(at, at + PAGE_NBYTES)
        other = mapping.start + (page + 1) % 256 * PAGE_NBYTES
        assert not has_own_pages(other, other + PAGE_NBYTES)


@pytest.mark.parametrize("place", [0, 100, 255])
@pytest.mark.parametrize("access", ["read", "write"])
def test_touched_page_is_told_from_one_that_is_not(fd, access, place):
    os.ftruncate(fd, 256 * PAGE_NBYTES)
    os.pwrite(fd, b"\1" * 256 * PAGE_NBYTES, 0)
    with mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        (mapping,) = mappings({inode_of(os.fstat(fd))})
        assert not is_touched(mapping.start, mapping.end)
        if access == "read":
            assert mapped[place * PAGE_NBYTES] == 1
        else:
            mapped[place * PAGE_NBYTES] = 2
        assert is_touched(mapping.start, mapping.end)
        page = mapping.start + place * PAGE_NBYTES
        assert is_touched(page, page + PAGE_NBYTES)
        # Only pages that lie completely in the range count.
        assert not is_touched(page + 1, page + PAGE_NBYTES)
        assert not is_touched(page, page + PAGE_NBYTES - 1)
        assert not is_touched(page, page)


def test_range_that_the_kernel_hides_may_have_any_pages(monkeypatch):
    def hide(*_, **__):
        raise PermissionError

    monkeypatch.setattr("builtins.open", hide)
    assert has_own_pages(0, PAGE_NBYTES)
    assert is_touched(0, PAGE_NBYTES)
