"""Publications: finished pipelines and models that have a name of their own in shared memory.

A version of one, such as `shm:NAME@1`, is a segment. It has the structure, the tensors that lie in
no other segment, and in its header the names of the segments that have the others. These are not
evicted before it.

Guarantee: a version appears whole, with its segment's name, and never changes. Publishing again
makes the next version.
"""

import re
from typing import NamedTuple

from shmload._segments.listing import SegmentInfo, segments_by_lock
from shmload._segments.names import SCHEME, publication_name
from shmload._segments.part import Part, acquire
from shmload.errors import ArgumentError, SegmentNotFound

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,99})(@(?P<version>[1-9][0-9]{0,8}))?")


class Publication(NamedTuple):
    """A name, and maybe a version."""

    name: str
    version: int | None

    @classmethod
    def parse(cls, text: str) -> "Publication":
        """Return what `NAME`, `shm:NAME` or `shm:NAME@3` means.

        Raises:
            ArgumentError: it is no name.
        """
        match = _NAME.fullmatch(text.removeprefix(SCHEME))
        if match is None:
            raise ArgumentError(
                f"{text!r} is no name of a publication: up to 100 letters, digits, '.', '_' and "
                "'-', and maybe a version, as in shm:flux-watercolour@3"
            )
        return cls(match["name"], int(match["version"]) if match["version"] else None)

    @property
    def source(self) -> str:
        """As a source: `shm:NAME`, or `shm:NAME@3`."""
        version = "" if self.version is None else f"@{self.version}"
        return f"{SCHEME}{self.name}{version}"

    def versions(self) -> dict[int, SegmentInfo]:
        """Return all versions of the name that are there, the oldest first."""
        found = {}
        for info in segments_by_lock():
            if info.source.startswith(f"{SCHEME}{self.name}@"):
                found[Publication.parse(info.source).version or 0] = info
        return dict(sorted(found.items()))

    def find(self) -> SegmentInfo:
        """Return this version, or the newest.

        Raises:
            SegmentNotFound: there is none.
        """
        versions = self.versions()
        number = self.version or max(versions, default=0)
        if number not in versions:
            raise SegmentNotFound(self.source, [info.source for info in versions.values()])
        return versions[number]

    def begin(self) -> "tuple[Publication, Part]":
        """Return the next version, and its part, which is the caller's.

        Raises:
            SharedMemoryFull: /dev/shm has no inodes left.
            SegmentUntrusted: the name belongs to another user.
        """
        number = max(self.versions(), default=0)
        while True:  # each number is another process's for good, once it has begun
            number += 1
            version = Publication(self.name, number)
            found = acquire(publication_name(version.source))
            if isinstance(found, Part):
                return version, found
            found.close()
