"""The content of a handle: the pipeline to load, the arguments, and a digest of its files."""

import contextlib
import hashlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import msgspec

from shmload._building.classes import name_class
from shmload._checkpoints.formats.known import format_named
from shmload._checkpoints.identity import lasting_key
from shmload._checkpoints.own_dtypes import settle_dtype
from shmload._checkpoints.source import Source, files_of
from shmload._checkpoints.wanted import Hub, Wanted

# Configurations and tokenizers are smaller; weights that are not safetensors files are larger.
_SMALL_NBYTES = 32 << 20


class Recipe(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a handle: the arguments of a load, and a digest of the files."""

    source: str
    # Under its older name: handles cross processes with other versions of shmload.
    dtype: str | dict[str, str | None] | None = msgspec.field(default=None, name="torch_dtype")
    components: tuple[str, ...] | None = None
    variant: str | None = None
    pipeline_class: str | None = None
    """Of diffusers by its name, or `module.Class`; None for the one that the source names."""
    revision: str | None = None
    cache_dir: str | None = None
    identity: str = ""
    """Digest of the source's files when the handle was made."""

    @classmethod
    def of(cls, wanted: Wanted, found: Source, pipeline_class: object = None) -> Self:
        """Return the recipe of a source that was found.

        Args:
            wanted: what to load.
            found: the source.
            pipeline_class: as for `load_pipeline`.

        Raises:
            ArgumentError: no other process can import the class.
        """
        dtype = settle_dtype(wanted.dtype, found)
        settled: Any = msgspec.structs.replace(wanted, dtype=dtype).settled()
        return cls(
            source=settled.source,
            dtype=settled.dtype,
            components=settled.components,
            variant=settled.variant,
            pipeline_class=_class_name(pipeline_class),
            revision=settled.hub.revision,
            cache_dir=settled.hub.cache_dir,
            identity=identity_of(found, settled.components),
        )

    @property
    def wanted(self) -> Wanted:
        """What to load. It never downloads: the maker of the handle has done that."""
        hub = Hub(
            revision=self.revision,
            cache_dir=self.cache_dir,
            local_files_only=not os.path.exists(self.source),
        )
        return Wanted(
            source=self.source,
            dtype=self.dtype,
            components=self.components,
            variant=self.variant,
            hub=hub,
        )


def _class_name(pipeline_class: object) -> str | None:
    if not isinstance(pipeline_class, type):
        return None if pipeline_class is None else str(pipeline_class)
    import diffusers  # which has been imported to make the class

    return name_class(pipeline_class, "pipeline_class", diffusers)


def identity_of(source: Source, components: Collection[str] | None) -> str:
    """Return a digest of a pipeline's files."""
    files = (
        (os.path.relpath(path, source.root), _stamp(path)) for path in files_of(source, components)
    )
    return hashlib.blake2b(repr(list(files)).encode(), digest_size=16).hexdigest()


def _stamp(path: Path) -> str:
    """Identify a file on any host: a small one by its content, weights by their `lasting_key`."""
    found = os.stat(path)
    if found.st_size <= _SMALL_NBYTES and not format_named(path.name):
        with contextlib.suppress(OSError):  # the library cannot read it either
            return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return lasting_key(path, found)
