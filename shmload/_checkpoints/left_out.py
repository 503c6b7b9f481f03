"""Weights of a source that shmload leaves to the libraries, and why there are none that it reads.

Guarantee: a wanted component with files of weights, of which shmload reads none, is named.
"""

import os
from pathlib import Path

import msgspec

from shmload._checkpoints.source import Source
from shmload._checkpoints.weights import weights_in, why_unread
from shmload._wording import format_nbytes


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A file of weights that shmload leaves to the libraries."""

    component: str
    """Its component; empty where there is no pipeline."""
    path: Path
    nbytes: int
    """Its size, in bytes."""
    why: str = ""
    """What shmload does not read in it; empty if it is in another format, or of a variant."""

    def __str__(self) -> str:
        """Return it in words, for errors and reports."""
        name = f"{self.component}/{self.path.name}" if self.component else self.path.name
        why = f": {self.why}" if self.why else ""
        return f"{name} ({format_nbytes(self.nbytes)}{why})"


def find_left_out(source: Source) -> tuple[LeftOut, ...]:
    """Return the files of weights in the folders of components of which shmload reads none."""
    found = []
    is_model = not (source.is_pipeline or source.checkpoints)
    for component in source.unread or ("",) * is_model:
        folder = source.folder_of(component)
        for path in (folder / name for name in weights_in(folder)):
            if os.path.isfile(path):
                why = getattr(why_unread(path), "why", "")
                nbytes = os.stat(path).st_size
                found.append(LeftOut(component=component, path=path, nbytes=nbytes, why=why))
    return tuple(found)


def why_none_is_read(source: Source) -> str:
    """Say why shmload reads no weights of a source, and what there is instead."""
    asked = f" of variant {source.variant!r}" if source.variant else ""
    there = ", ".join(map(str, find_left_out(source)))
    if not there:
        return f"it has no weights{asked} that shmload reads"
    return (
        f"it has no weights{asked} that shmload reads, but {there}: ask for a variant by its name "
        "(variant=), give the path of one file, or let the library load it"
    )
