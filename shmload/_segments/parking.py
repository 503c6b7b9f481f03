"""Segments that a process gives up for a while; its tensors keep their addresses.

Between `park` and `resume` the process maps no segment and has no lease, so any process may remove
them. The addresses stay reserved: to read there is a segmentation fault.
"""

import os
from dataclasses import dataclass

from shmload._host.descriptors import Inode, inode_of, try_lock
from shmload._host.memory import map_at, reserve_at
from shmload._host.pagemap import is_modified
from shmload._host.procfs import Mapping, mappings
from shmload._host.shm import SHM_DIR, reopen
from shmload._segments.names import name_prefix
from shmload._segments.segment import READ_ONLY, Segment, attach


class CannotPark(Exception):
    """Some segment is in a use that cannot be resumed; str says which."""


class CannotResume(Exception):
    """A segment is not there any more; str says which."""


class DescriptorClosed(CannotResume):
    """The program has closed a descriptor that a segment had; str says which."""


@dataclass(frozen=True, slots=True)
class _Descriptor:
    """A descriptor of a segment: its number, and whether it had a lease."""

    number: int
    name: str
    is_leased: bool


@dataclass(frozen=True, slots=True)
class Parked:
    """What a process had of some segments."""

    _descriptors: list[_Descriptor]
    _mapped: list[tuple[Mapping, str]]
    """The mappings, with the segment's name."""
    _inodes: dict[str, Inode]
    """Of the segments, by name."""
    _stand_in: Inode
    """The file that the descriptors lead to meanwhile."""

    @property
    def numbers(self) -> set[int]:
        """The descriptors that have to stay open until `resume`."""
        return {descriptor.number for descriptor in self._descriptors}

    def resume(self) -> None:
        """Take the leases again, and map the segments where they were.

        Raises:
            CannotResume: a segment was removed.
            DescriptorClosed: a descriptor is another file's by now.
            ShmloadError: a name in /dev/shm is another user's.
        """
        segments: dict[str, Segment] = {}
        try:
            for name, inode in self._inodes.items():
                segment = attach(name)
                if segment is None:
                    raise CannotResume(f"{name} was removed")
                segments[name] = segment
                if segment.inode != inode:
                    raise CannotResume(f"{name} is another one by now")
            for descriptor in self._descriptors:
                self._resume_descriptor(descriptor, segments[descriptor.name])
            for mapping, name in self._mapped:
                map_at(mapping.start, mapping.end, segments[name].fd, mapping.offset)
            for segment in segments.values():
                segment.touch()
        finally:
            for segment in segments.values():
                segment.close()

    def _resume_descriptor(self, descriptor: _Descriptor, segment: Segment) -> None:
        try:
            is_ours = inode_of(os.fstat(descriptor.number)) == self._stand_in
        except OSError:
            is_ours = False
        if not is_ours:
            raise DescriptorClosed(f"descriptor {descriptor.number} was closed")
        opened = reopen(segment.fd)
        try:
            if descriptor.is_leased:
                try_lock(opened, exclusive=False)  # cannot fail: the segment has such a lock
            os.dup2(opened, descriptor.number, inheritable=False)
        finally:
            os.close(opened)


def park() -> Parked:
    """Give up all segments that this process has attached.

    No thread may use their tensors meanwhile.

    Raises:
        CannotPark: a segment has no name, or the process has written to its mapping.
    """
    descriptors = _own_descriptors()
    inodes: dict[str, Inode] = {}
    for descriptor in descriptors:
        inodes[descriptor.name] = inode_of(os.fstat(descriptor.number))
    names = {inode: name for name, inode in inodes.items()}
    mapped = [(mapping, names[mapping.inode]) for mapping in mappings(set(names))]
    for mapping, name in mapped:
        if mapping.permissions != "rw-p" or is_modified(mapping):
            raise CannotPark(f"{name} is mapped as {mapping.permissions}, or was written to")
    stand_in = os.memfd_create("shmload-parked", os.MFD_CLOEXEC)
    try:
        os.fchmod(stand_in, READ_ONLY)  # who closes a lease looks at the file's mode
        for descriptor in descriptors:
            os.dup2(stand_in, descriptor.number, inheritable=False)
        for mapping, _ in mapped:
            reserve_at(mapping.start, mapping.end)
        return Parked(descriptors, mapped, inodes, inode_of(os.fstat(stand_in)))
    finally:
        os.close(stand_in)


def _own_descriptors() -> list[_Descriptor]:
    """Return this process's descriptors of segments.

    Raises:
        CannotPark: one is of a segment without a name.
    """
    found = []
    beginning = f"{SHM_DIR}/{name_prefix()}"
    for entry in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue  # the directory's own
        if path.startswith(beginning):
            if path.endswith(" (deleted)"):
                raise CannotPark(f"{path} has no name")
            found.append(_Descriptor(int(entry), os.path.basename(path), _is_leased(int(entry))))
    return found


def _is_leased(fd: int) -> bool:
    """Tell whether a descriptor has a lock."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as lines:
        return any(line.startswith("lock:") for line in lines)
