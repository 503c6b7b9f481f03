"""The kernel tells which pages this process has read, and which it has written."""

import errno
import mmap
import os

import pytest

from shmload._host import memory
from shmload._host.descriptors import inode_of
from shmload._host.memory import PAGE_NBYTES, has_own_pages, is_touched
from shmload._host.procfs import mappings_of


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


@pytest.mark.parametrize("place", [0, 100, 255])
@pytest.mark.parametrize("access", ["read", "write"])
def test_page_is_known_to_be_touched_and_to_be_this_processs_own(fd, access, place):
    os.ftruncate(fd, 256 * PAGE_NBYTES)
    os.pwrite(fd, b"\1" * 256 * PAGE_NBYTES, 0)
    with mmap.mmap(fd, 0, access=mmap.ACCESS_COPY) as mapped:
        mapped.madvise(mmap.MADV_RANDOM)
        (mapping,) = mappings_of({inode_of(os.fstat(fd))})
        assert not is_touched(mapping.start, mapping.end)
        if access == "read":
            assert mapped[place * PAGE_NBYTES] == 1
        else:
            mapped[place * PAGE_NBYTES] = 2
        page = mapping.start + place * PAGE_NBYTES
        for start, end in ((mapping.start, mapping.end), (page, page + PAGE_NBYTES)):
            assert is_touched(start, end)
            assert has_own_pages(start, end) == (access == "write")
        # Only pages that lie completely in the range count.
        assert not is_touched(page + 1, page + PAGE_NBYTES)
        assert not is_touched(page, page + PAGE_NBYTES - 1)
        assert not is_touched(page, page)
        other = mapping.start + (place + 1) % 256 * PAGE_NBYTES
        assert not has_own_pages(other, other + PAGE_NBYTES)


def test_range_that_the_kernel_hides_may_have_any_pages(monkeypatch):
    def hide(*_, **__):
        raise PermissionError

    monkeypatch.setattr("builtins.open", hide)
    assert has_own_pages(0, PAGE_NBYTES)
    assert is_touched(0, PAGE_NBYTES)
