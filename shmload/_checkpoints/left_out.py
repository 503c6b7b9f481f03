"""Weights of a source that shmload leaves to the libraries, and why there are none that it reads.

Guarantee: a wanted component with files of weights, of which shmload reads none, is named.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from shmload._checkpoints.formats.known import format_named, is_of_model, variant_of
from shmload._checkpoints.source import Source
from shmload._checkpoints.weights import (
    variants_below,
    weights_in,
    why_file_is_unread,
)
from shmload._wording import format_nbytes, nearest


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A file of weights that shmload leaves to the libraries."""

    component: str
    """Its component; empty where there is no pipeline."""
    path: Path
    kind: str
    """What it is, such as `PyTorch file`; `variant fp16` if that variant was not asked for."""
    nbytes: int
    """Its size, in bytes."""
    why: str = ""
    """What shmload does not read in it, if it reads other files of this kind."""

    def __str__(self) -> str:
        """Return it in words, for errors and reports."""
        name = f"{self.component}/{self.path.name}" if self.component else self.path.name
        why = f": {self.why}" if self.why else ""
        return f"{name} ({self.kind}, {format_nbytes(self.nbytes)}{why})"


def find_left_out(source: Source, variant: str | None) -> tuple[LeftOut, ...]:
    """Return the files that the libraries would load themselves, or that are of another variant.

    Opens these files, to tell what they are.

    Args:
        source: resolved for the same variant.
        variant: as for `from_pretrained`.
    """
    found = []
    for component in source.unread:
        for path in _files_left(source.folder_of(component), variant):
            cause = why_file_is_unread(path)
            is_variant = _is_variant(path, variant)
            found.append(
                LeftOut(
                    component=component,
                    path=path,
                    kind=f"variant {variant_of(path.name)}" if is_variant else _kind_of(path.name),
                    nbytes=os.stat(path).st_size,
                    why=getattr(cause, "why", ""),
                )
            )
    return tuple(found)


def why_unread(source: Source, variant: str | None) -> str:
    """Say why shmload reads no weights of a source, and what there is instead."""
    variants = sorted(variants_below(source.root)) if source.root.is_dir() else []
    others = [
        each for each in find_left_out(source, variant) if not _is_variant(each.path, variant)
    ]
    reason = "it has no weights that shmload reads"
    if variant:
        reason = f"it has no weights of variant {variant!r} that shmload reads"
    if variants:
        reason += f"; {_ask_for(variants)}"
    elif others and all(_needs_a_name(each.path) for each in others):
        reason += f" by themselves, but {', '.join(map(str, others))}: give the path of the file"
    elif others:
        reason += (
            f" but {', '.join(map(str, others))}: let the library load it, or load it once and "
            "`save_pretrained`"
        )
    return reason


def hint_of_variants(source: Source, subfolder: str | None = None) -> str:
    """Say which variants there are of weights that a library found no files of; may be empty.

    Args:
        source: a pipeline, or a model's repository.
        subfolder: the model's directory in it.
    """
    if source.is_pipeline:
        folders = {name: source.folder_of(name) for name in source.unread}
    else:
        folders = {} if source.checkpoints else {"": source.root / (subfolder or "")}
    hints = (
        (name, sorted(variants_below(folder)))
        for name, folder in folders.items()
        if folder.is_dir()
    )
    return "; ".join(
        f"{os.path.join(source.given, name) if name else source.given}: {_ask_for(variants)}"
        for name, variants in hints
        if variants and source.variant not in variants
    )


def hint_of_subfolders(source: Source, subfolder: str | None) -> str:
    """Say which subfolders of a repository hold models, if the one asked for does not; else empty.

    Args:
        source: a model's repository.
        subfolder: what was asked for.
    """
    if source.is_pipeline or source.checkpoints or not source.root.is_dir():
        return ""
    if (source.root / (subfolder or "") / "config.json").is_file():
        return ""
    names = [path.parent.name for path in sorted(source.root.glob("*/config.json"))]
    if not names:
        return ""
    near = nearest(subfolder, names) if subfolder else ""
    return f"{source.given} has models in its subfolders {', '.join(names)}: give subfolder=" + (
        f"{names[0]!r} or another{near}"
    )


def _ask_for(variants: Sequence[str]) -> str:
    which = "it" if len(variants) == 1 else "one"
    return (
        f"it has variant {', '.join(variants)}: ask for {which} with variant={variants[0]!r} "
        f"(--variant {variants[0]})"
    )


def _needs_a_name(path: Path) -> bool:
    """Tell whether a file has a format in which a library is told the name."""
    named = format_named(path.name)
    return named is not None and not named.base_names


def _is_variant(path: Path, asked: str | None) -> bool:
    """Tell whether a file is left out because it is of another variant than was asked for."""
    return variant_of(path.name) not in (None, asked)


def _kind_of(name: str) -> str:
    named = format_named(name)
    return f"{named.name if named else os.path.splitext(name)[1]} file"


def plain_weights_left(folder: Path) -> list[Path]:
    """Return a model's files of weights of no variant, in formats that may be left to a library."""
    names = (name for name in _perhaps_unread(weights_in(folder)) if is_of_model(name))
    return [folder / name for name in names if variant_of(name) is None]


def _perhaps_unread(names: Iterable[str]) -> list[str]:
    return [name for name in names if (named := format_named(name)) and named.may_be_unread]


def _files_left(folder: Path, variant: str | None) -> Iterator[Path]:
    """Yield the files of weights in a folder: the first kind that it has, as the libraries look."""
    names = weights_in(folder)
    unread = _perhaps_unread(names)
    models = [name for name in unread if is_of_model(name)]
    groups = (
        [name for name in models if variant_of(name) == variant],
        [name for name in models if variant_of(name) is None],
        [name for name in names if format_named(name) and name not in unread],
        models,
        unread,
        names,
    )
    for name in next(filter(None, groups), ()):
        if os.path.isfile(folder / name):
            yield folder / name
