"""Completion of the names of resident models in a shell, by click's own mechanism.

It runs at every press of the Tab key: it reads headers in /dev/shm, and neither processes nor
weights.
"""

import contextlib
import re

import click
from click.shell_completion import CompletionItem

from shmload._checkpoints.dtypes import AUTO, dtype_names
from shmload._segments.grouping import Model, group_segments
from shmload._segments.listing import segments
from shmload._segments.roots import find_roots
from shmload._wording import format_nbytes
from shmload.errors import ShmloadError

_ID = re.compile(r"[0-9a-f]{1,8}")


def complete_names(
    _context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return what may follow: names, their last folders, ids that begin so, or else paths."""
    # Nothing may be printed between what the user types.
    with contextlib.suppress(ShmloadError, OSError):
        found = segments()
        roots = find_roots(info.source for info in found if info.source)
        listed = group_segments(found, roots, {}, {})
        names = {model.name for model in listed}
        chosen = {
            name: _describe([model for model in listed if model.name == each.name])
            for each in listed
            for name in (each.name, each.name.rpartition("/")[2])
            if name.startswith(typed) and (name == each.name or (typed and _is_one(name, names)))
        }
        if _ID.fullmatch(typed):
            chosen |= {
                model.id: f"{model.name}, {_describe([model])}"
                for model in listed
                if model.id.startswith(typed)
            }
        if chosen:
            return [CompletionItem(name, help=text) for name, text in sorted(chosen.items())]
    return [CompletionItem(typed, type="file")]


def complete_paths(
    _context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Let the shell complete paths; without this it completes nothing for a source."""
    return [CompletionItem(typed, type="file")]


def complete_dtypes(
    _context: click.Context, _parameter: click.Parameter, typed: str
) -> list[CompletionItem]:
    """Return the dtypes that begin so, also behind `COMPONENT=`."""
    component, equals, begun = typed.rpartition("=")
    return [
        CompletionItem(f"{component}{equals}{name}")
        for name in (*dtype_names(), AUTO)
        if name.startswith(begun)
    ]


def _is_one(part: str, names: set[str]) -> bool:
    """Tell whether a part of a name means one model to `rm`."""
    return sum(part.casefold() in name.casefold() for name in names) == 1


def _describe(models: list[Model]) -> str:
    """Write what a name stands for, beside it in a shell that shows that."""
    return "; ".join(f"{model.dtype}, {format_nbytes(model.nbytes)}" for model in models)
