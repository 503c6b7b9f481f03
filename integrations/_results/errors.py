"""Errors of the files in a folder of results."""

import contextlib
import errno
import os
from collections.abc import Iterator

from shmload.errors import ResultsInaccessible, ShmloadError

AGAIN = "remove it and run the job again, which computes its items anew"
"""What to do about a damaged file."""


@contextlib.contextmanager
def accessing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what the kernel says of a file, or of one beneath it, as `ResultsInaccessible`."""
    try:
        yield
    except OSError as exc:
        if isinstance(exc, ShmloadError):
            raise
        where = exc.filename if isinstance(exc.filename, str) else path
        number = exc.errno or errno.EIO
        raise ResultsInaccessible(where, exc.strerror or str(exc), number) from exc
