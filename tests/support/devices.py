"""Fake devices: the host stands in for an accelerator that copies as late as it may."""

import itertools
import weakref
from collections import deque

import torch

from shmload._runtimes.runtime import ALIGNMENT_NBYTES


class LateDevice:
    """Copies only when a caller waits, so that code which reuses a source too early fails.

    Args:
        fails_at: the number of the copy that fails, from 0; None for never.
        registers: whether it registers memory.
        locks: whether it has page-locked memory of its own.
        registers_read_only: whether it registers pages that are mapped for reading only.
        is_integrated: whether it shares the host's memory; then it refuses sources that the kernel
            would copy.
    """

    device = torch.device("cpu")
    name = "a late device"

    def __init__(
        self,
        fails_at=None,
        *,
        registers=True,
        locks=False,
        registers_read_only=True,
        is_integrated=False,
    ):
        self.calls = []
        self.registered = {}
        self.is_integrated = is_integrated
        self._fails_at = fails_at
        self._registers = registers
        self._locks = locks
        self._registers_read_only = registers_read_only
        self._copies = itertools.count()
        self._queue = deque()
        self.allocated = 0
        """Bytes from `empty` that are still in use."""
        self.room = None
        """How many bytes may be in use; None for no limit."""

    @property
    def pending(self):
        """Number of copies that are still due."""
        return len(self._queue)

    def reserve(self, sizes):
        pass

    def empty(self, nbytes):
        if self.room is not None and self.allocated + nbytes > self.room:
            raise torch.OutOfMemoryError("the device is full")
        raw = torch.full((nbytes + ALIGNMENT_NBYTES,), 0xAA, dtype=torch.uint8)
        self.allocated += nbytes
        weakref.finalize(raw.untyped_storage(), self._free, nbytes).atexit = False
        begin = -raw.data_ptr() % ALIGNMENT_NBYTES
        self.calls.append("empty")
        return raw[begin : begin + nbytes]

    def _free(self, nbytes):
        self.allocated -= nbytes

    def copy(self, copies):
        for target, source in copies:
            assert target.shape == source.shape
            assert target.dtype == source.dtype == torch.uint8
            if self.is_integrated:
                assert not is_copied_on_read(source.data_ptr()), "the kernel copies each page"
            if next(self._copies) == self._fails_at:
                raise torch.OutOfMemoryError("the device is full")
            self.calls.append("copy")
            self._queue.append((target, source))

    def follow(self):
        self.calls.append("follow")

    def join(self):
        # What follows computes on the host, at once: the copies have to be there.
        while self._queue:
            self._copy_one()
        self.calls.append("join")

    def _copy_one(self):
        target, source = self._queue.popleft()
        target.copy_(source)

    def page_locked(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8) if self._locks else None

    def keep(self, memory):
        pass

    def record(self):
        return _Point(self, list(self._queue))

    def drain(self):
        self.record().synchronize()

    def register(self, address, nbytes, *, read_only):
        self.calls.append("register")
        if not self._registers or self._overlaps(address, address + nbytes):
            return False
        if read_only and not self._registers_read_only:  # as CUDA's error 801
            return False
        if not read_only and "w" not in mapping_at(address)[1]:  # as CUDA's error 1
            return False
        self.registered[address] = nbytes
        return True

    def _overlaps(self, begin, end):
        return any(there < end and begin < there + n for there, n in self.registered.items())

    def unregister(self, address):
        self.calls.append("unregister")
        end = address + self.registered.pop(address)
        for _, source in self._queue:
            assert not address <= source.data_ptr() < end, "a copy from there is under way"


def mapping_at(address):
    """Return the fields of the line of /proc/self/maps for an address; the second is the mode."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            fields = line.split()
            start, end = (int(part, 16) for part in fields[0].split("-"))
            if start <= address < end:
                return fields
    return "", ""


def is_copied_on_read(address):
    """Tell whether an integrated device that reads there has the kernel copy pages of a file."""
    _, mode, _, _, inode, *_ = mapping_at(address)
    return mode == "rw-p" and inode != "0"


class _Point:
    def __init__(self, device, before):
        self._device = device
        self._before = before

    def synchronize(self):
        queue = self._device._queue
        while any(copy is other for copy in self._before for other in queue):
            self._device._copy_one()
        self._device.calls.append("wait")
