"""Finds the memory of a pipeline's tensors in /proc/self."""

import bisect
import math
from pathlib import Path

import torch

import shmload
from shmload._building.mapped import is_in
from shmload._host.descriptors import inode_of
from shmload._host.procfs import mappings_of
from shmload._host.shm import SHM_DIR


class Mappings:
    """A snapshot of /proc/self/maps."""

    def __init__(self):
        self._lines = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(None, 5)
            first, _, last = fields[0].partition("-")
            name = fields[5] if len(fields) > 5 else ""
            self._lines.append((int(first, 16), int(last, 16), name))

    def find(self, tensor):
        """Return start and name of the mapping that holds a tensor."""
        address = tensor.data_ptr()
        start, end, name = self._lines[bisect.bisect(self._lines, (address, math.inf)) - 1]
        assert start <= address < end
        return start, name


def copied_nbytes(pipe):
    """Return how many bytes of a pipeline's mappings are private copies of this process."""
    return copied_nbytes_of(state_of(pipe).values())


def copied_nbytes_of(tensors):
    """Return how many bytes of the mappings of plain tensors are private copies of this process.

    The field is "Anonymous". "Private_Dirty" would also count a page of shared memory that only one
    process maps at the moment.
    """
    starts = {start for start, _ in map(Mappings().find, tensors)}
    total, is_counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if not fields[0].endswith(":"):
            is_counted = int(fields[0].partition("-")[0], 16) in starts
        elif is_counted and fields[0] == "Anonymous:":
            total += int(fields[1]) * 1024
    return total


def state_of(pipe):
    return {
        f"{name}.{key}": tensor
        for name, part in pipe.components.items()
        if isinstance(part, torch.nn.Module)
        for key, tensor in part.state_dict().items()
    }


def in_no_segment(tensors):
    """Return those of some tensors, by name, that lie in no segment that is resident."""
    mappings = mappings_of({inode_of((SHM_DIR / each.name).stat()) for each in shmload.segments()})
    return {name: each for name, each in tensors.items() if not is_in(mappings, each)}
