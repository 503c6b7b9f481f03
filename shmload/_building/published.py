"""What was published, loaded in this process: its structure over its segments."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from shmload._building import stored
from shmload._building.stored import Opened, restore
from shmload._segments.publications import Publication
from shmload.errors import ArgumentError


@contextlib.contextmanager
def opened(source: str) -> Iterator[Opened]:
    """Attach and map a version inside the block; what is made over it stays valid.

    Args:
        source: `shm:NAME`, for the newest version, or `shm:NAME@VERSION`.

    Raises:
        SegmentNotFound: there is no such publication.
        PublicationError: a segment that it needs is gone.
    """
    version, own = Publication.parse(source).attach()
    with stored.opened(version.source, own) as found:
        yield found


def load_published(source: str, given: Mapping[str, object] | None = None) -> Any:
    """Return the pipeline or model of a publication.

    Args:
        source: as for `opened`.
        given: the other arguments of the call; each must be None or False.

    Raises:
        SegmentNotFound: there is no such publication.
        PublicationError: it cannot be loaded here; says why.
        ArgumentError: an argument that a publication does not take.
    """
    asked = given or {}
    if others := sorted(
        name for name, value in asked.items() if value is not None and value is not False
    ):
        raise ArgumentError(
            f"{source} is loaded as it was published: leave out {', '.join(others)}"
        )
    with opened(source) as version:
        return restore(version)
