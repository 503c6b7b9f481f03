"""What the pipeline classes of diffusers are made of, remembered on disk.

Only the class can tell, and importing it takes seconds. What is remembered lets decoding begin
before that, without components that the class does not take.
"""

import contextlib
import hashlib
from collections.abc import Collection
from pathlib import Path

import msgspec

from shmload._checkpoints.rules import library_versions
from shmload._host.files import replacing
from shmload._settings import settings


class ClassParts(msgspec.Struct, frozen=True):
    """The components that a class takes."""

    names: tuple[str, ...] | None
    """None for a class that chooses another one by the source."""


def remembered_parts(class_name: str) -> ClassParts | None:
    """Return what a class of diffusers is made of; None if that is not remembered."""
    try:
        return msgspec.json.decode(_memory_path(class_name).read_bytes(), type=ClassParts)
    except (OSError, msgspec.DecodeError):
        return None


def remember_parts(class_name: str, names: Collection[str] | None) -> None:
    """Write what a class is made of; if that fails, the next load imports the class first."""
    parts = ClassParts(None if names is None else tuple(sorted(names)))
    if remembered_parts(class_name) == parts:
        return
    path = _memory_path(class_name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(msgspec.json.encode(parts))


def _memory_path(class_name: str) -> Path:
    known = repr((library_versions(), class_name)).encode()
    name = hashlib.blake2b(known, digest_size=16).hexdigest()
    return settings().cache_dir / "classes" / name
