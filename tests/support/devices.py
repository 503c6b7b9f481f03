"""Fake devices: the host stands in for an accelerator that copies as late as it may."""

import contextlib
import itertools
import weakref
from collections import deque

import torch

from shmload._runtimes.runtime import ALIGNMENT_NBYTES


class LateDevice:
    """Copies only when a caller waits, so that code which reuses a source too early fails.

    Args:
        fails_at: the number of the copy that fails, from 0; None for never.
        registers: whether it accepts pages for registration.
        pins: whether it has pinned memory of its own instead.
        read_only: whether it registers pages that are mapped for reading only: `yes`; `no`, and it
            says so; or `refused`, which it finds out when it is asked to.
    """

    device = torch.device("cpu")
    name = "a late device"
    driver = "1.0"

    def __init__(self, fails_at=None, registers=True, pins=False, read_only="yes"):
        self.calls = []
        self.registered = {}
        self.largest_registered = 0
        self._fails_at = fails_at
        self._registers = registers
        self._pins = pins
        self._refuses_read_only = read_only != "yes"
        self.registers_read_only = read_only != "no"
        self._copies = itertools.count()
        self._lanes = {}
        self.reserved = []
        """The sizes that were announced, for each module."""
        self.allocated = 0
        """Bytes from `empty` that are still in use."""
        self.room = None
        """How many bytes may be in use; None for no limit."""

    @property
    def pending(self):
        """Number of copies that are still due."""
        return sum(map(len, self._lanes.values()))

    def reserve(self, sizes):
        self.reserved.append(list(sizes))

    def using(self, lane):
        return contextlib.nullcontext()

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

    def copy(self, target, source, lane):
        assert target.shape == source.shape
        assert target.dtype == source.dtype == torch.uint8
        if next(self._copies) == self._fails_at:
            raise torch.OutOfMemoryError("the device is full")
        self.calls.append("copy")
        self._lanes.setdefault(lane, deque()).append((target, source))

    def follow(self, lane):
        self.calls.append("follow")

    def join(self, lane):
        # What follows computes on the host, at once: the copies have to be there.
        copies = self._lanes.setdefault(lane, deque())
        while copies:
            target, source = copies.popleft()
            target.copy_(source)
        self.calls.append("join")

    def pinned(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8) if self._pins else None

    def record(self, lane):
        copies = self._lanes.setdefault(lane, deque())
        return _Point(self, copies, list(copies))

    def register(self, address, nbytes, *, read_only):
        self.calls.append("register")
        if not self._registers or self._overlaps(address, address + nbytes):
            return False
        if read_only and self._refuses_read_only:  # as CUDA's error 801
            assert self.registers_read_only, "what is known to fail is not tried"
            self.registers_read_only = False
            return False
        if not read_only and not is_writable(address):  # as CUDA's error 1
            return False
        self.registered[address] = nbytes
        self.largest_registered = max(self.largest_registered, nbytes)
        return True

    def _overlaps(self, begin, end):
        return any(there < end and begin < there + n for there, n in self.registered.items())

    def unregister(self, address):
        self.calls.append("unregister")
        end = address + self.registered.pop(address)
        for lane in self._lanes.values():
            for _, source in lane:
                assert not address <= source.data_ptr() < end, "a copy from there is under way"


def is_writable(address):
    """Tell whether this process may write to an address."""
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, mode, *_ = line.split()
            start, end = (int(part, 16) for part in addresses.split("-"))
            if start <= address < end:
                return "w" in mode
    return False


class _Point:
    def __init__(self, device, lane, before):
        self._device = device
        self._lane = lane
        self._before = before

    def _is_over(self):
        return not any(copy is other for copy in self._before for other in self._lane)

    def wait(self):
        while not self._is_over():
            target, source = self._lane.popleft()
            target.copy_(source)
        self._device.calls.append("wait")
