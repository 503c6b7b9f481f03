"""Publications: finished pipelines and models that have a name of their own in shared memory.

A version of one, such as `shm:NAME@1`, is a segment. It has the structure, the tensors that lie in
no other segment, and in its header the names of the segments that have the others. Those stay as
long as a publication needs them.

Guarantee: a version appears whole, with its segment's name, and its bytes never change. Publishing
again makes the next version.
"""

import re
from typing import NamedTuple

from shmload._checkpoints.wanted import SCHEME
from shmload._segments.metadata import read_metadata
from shmload._segments.names import publication_name
from shmload._segments.part import Part, acquire
from shmload._segments.segment import Segment, attach, open_segments
from shmload._wording import nearest
from shmload.errors import ArgumentError, SegmentNotFound

_NAME = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,99})(@(?P<version>[1-9][0-9]{0,8}))?")
# How often to look for the newest version: it may be removed before it is opened.
_TRIES = 3


class Publication(NamedTuple):
    """A name, and maybe a version."""

    name: str
    version: int | None = None

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

    def versions(self) -> dict[int, str]:
        """Return the segments of all versions of the name, the oldest first."""
        found = {}
        for segment in open_segments():
            metadata = read_metadata(segment.fd)
            if metadata and metadata.source.startswith(f"{SCHEME}{self.name}@"):
                found[Publication.parse(metadata.source).version or 0] = segment.name
        return dict(sorted(found.items()))

    def newest(self) -> "Publication":
        """Return the newest version.

        Raises:
            SegmentNotFound: there is none.
        """
        versions = self.versions()
        if not versions:
            raise SegmentNotFound(f"nothing is published as {self.source}; `shmload ls` lists all")
        return Publication(self.name, max(versions))

    def attach(self) -> tuple["Publication", Segment]:
        """Attach this version, or the newest; return it, and its segment, which is the caller's.

        Raises:
            SegmentNotFound: there is none.
            SegmentUntrusted: its name belongs to another user.
        """
        for _ in range(_TRIES if self.version is None else 1):
            version = self.newest() if self.version is None else self
            segment = attach(publication_name(version.source))
            if segment:
                return version, segment
        known = [Publication(self.name, number).source for number in self.versions()]
        raise SegmentNotFound(
            f"there is no {self.source}{nearest(self.source, known) or ';'} `shmload ls` lists all"
        )

    def begin(self) -> tuple[int, Part]:
        """Return the number of the next version, and its part, which is the caller's.

        Raises:
            SharedMemoryFull: /dev/shm has no inodes left.
            SegmentUntrusted: the name belongs to another user.
        """
        number = max(self.versions(), default=0)
        while True:  # another process may have begun the next
            number += 1
            found = acquire(publication_name(Publication(self.name, number).source))
            if isinstance(found, Part):
                return number, found
            found.close()
