"""What the pipeline classes of diffusers are made of, remembered on disk.

Only the class can tell, and importing it takes seconds. What is remembered lets decoding begin
before that, without components that the class does not take.
"""

from collections.abc import Collection

import msgspec

from shmload._checkpoints.rule import library_versions
from shmload._host.memo import Memo


class ClassParts(msgspec.Struct, frozen=True):
    """The components that a class takes."""

    names: tuple[str, ...] | None
    """None for a class that chooses another one by the source."""


def remembered_parts(class_name: str) -> ClassParts | None:
    """Return what a class of diffusers is made of; None if that is not remembered."""
    return _memo(class_name).read()


def remember_parts(class_name: str, names: Collection[str] | None) -> None:
    """Write what a class is made of; if that fails, the next load imports the class first."""
    parts = ClassParts(None if names is None else tuple(sorted(names)))
    if remembered_parts(class_name) != parts:
        _memo(class_name).write(parts)


def _memo(class_name: str) -> Memo[ClassParts]:
    return Memo("classes", ClassParts, (library_versions(), class_name))
