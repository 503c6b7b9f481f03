"""What was found of a source: a pipeline, one component or one file, with its files of weights.

Guarantee: a wanted component with files of weights, of which shmload reads none, is named.
"""

import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec

from shmload._checkpoints.formats.known import is_of_weights
from shmload._checkpoints.weights import weights_in, why_unread
from shmload._wording import format_nbytes, nearest
from shmload.errors import UnknownComponent

INDEX = "model_index.json"
MODULAR_INDEX = "modular_model_index.json"


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The weight files of a pipeline's component, or of a single directory or file."""

    component: str = ""
    """Its name in the pipeline; empty where there is no pipeline."""
    folder: Path
    """The directory that the weights are in."""
    library: str = ""
    """`diffusers`, `transformers`, a module of diffusers' pipelines, or empty if unknown."""
    class_name: str = ""
    """Name of the model's class; empty if unknown."""
    config: dict[str, Any] = {}
    """Its `config.json`, or empty."""
    shards: tuple[Path, ...]
    """In the order of their names."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline, one component, or one file, on the local disk."""

    given: str | os.PathLike[str]
    """What the user named."""
    root: Path
    """The directory, or the file."""
    class_name: str = ""
    """Name of the pipeline's class; empty if the source is no pipeline, or brings its own code."""
    components: tuple[str, ...] = ()
    """All components that the pipeline lists, with weights or without."""
    checkpoints: tuple[Checkpoint, ...] = ()
    """Those whose weights are in a format that shmload reads."""
    is_complete: bool = True
    """Whether nothing is missing on this disk: every wanted component has a directory, at least one
    has files of the variant, and no file of weights was guessed from what is there."""
    unread: tuple[str, ...] = ()
    """Wanted components whose weights shmload does not read; the root has an empty name."""
    variant: str | None = None
    """The variant that was asked for."""
    choices: tuple[str, ...] = ()
    """Files of weights in the root, if there are several and none was named."""
    is_modular: bool = False
    """Whether it is a modular pipeline, whose components may lie anywhere (`modular`)."""
    folders: dict[str, Path] = {}
    """The folders of components that do not lie in a folder of their name below the root."""

    @property
    def is_pipeline(self) -> bool:
        """Whether there is an index of a pipeline."""
        return bool(self.components) or self.is_modular

    @property
    def index(self) -> Path:
        """The file that lists a pipeline's components."""
        return self.root / (MODULAR_INDEX if self.is_modular else INDEX)

    def folder_of(self, component: str) -> Path:
        """Return the directory of a component; of an empty name the root."""
        return self.folders.get(component, self.root / component)

    @property
    def shards(self) -> list[Path]:
        """The files of all checkpoints."""
        return [shard for checkpoint in self.checkpoints for shard in checkpoint.shards]


def components_with_weights(source: Source) -> set[str]:
    """Return the components of a pipeline that have weights, in any format."""
    return {name for name in source.components if weights_in(source.folder_of(name))}


def weight_files(source: Source) -> list[Path]:
    """Return all files of weights in the directories of a pipeline's components."""
    folders = map(source.folder_of, source.components)
    return [folder / name for folder in folders for name in weights_in(folder)]


def files_of(source: Source, components: Collection[str] | None = None) -> list[Path]:
    """Return the files that a pipeline is made of: code, weights, configurations, tokenizers.

    Args:
        source: a pipeline, resolved with the same components.
        components: other components with weights are left out; None for all.
    """
    found = [source.index, *sorted(source.root.glob("*.py"))]
    left_out = components_with_weights(source) if components is not None else set()
    with_shards = {checkpoint.component for checkpoint in source.checkpoints}
    for name in sorted(set(source.components).difference(left_out.difference(components or ()))):
        folder = source.folder_of(name)
        if os.path.isdir(folder):
            names = [each for each in sorted(os.listdir(folder)) if not each.startswith(".")]
            if name in with_shards:  # other weights in the folder are not read
                names = [each for each in names if not (is_of_weights(each) or ".index." in each)]
            found += (folder / each for each in names)
    return [*filter(os.path.isfile, found), *source.shards]


def no_component(
    name: str, source: str | os.PathLike[str], known: Iterable[str]
) -> UnknownComponent:
    """Return the error for a component that a source does not have.

    Args:
        name: the component.
        source: as given.
        known: the components that it has.
    """
    there = sorted(known)
    return UnknownComponent(
        f"{source} has no component {name!r}; it has {', '.join(there)}{nearest(name, there)}",
        name=name,
    )


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
