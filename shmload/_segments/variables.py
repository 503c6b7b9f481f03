"""Finds the variables of this process whose tensors lie in segments, for a message to the user."""

import contextlib
import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from types import FrameType
from typing import Any

from shmload._host.linux import SHM_DIR, inode_of
from shmload._host.procfs import mappings

_PACKAGE = __name__.partition(".")[0]
# In lists and dicts, and in the components of a pipeline, the models are this deep.
_DEPTH = 2
_MAX_PARTS = 10_000  # of a list or dict


def variables_over(names: Collection[str]) -> list[str] | None:
    """Return the variables of the calling functions and their modules that lie in segments.

    A variable counts if it is a tensor or a model, or a pipeline, dict or list of these. Imports
    nothing: without torch there are no tensors.

    Args:
        names: of segments that this process holds.

    Returns:
        The names of the variables; None if no segment is given.
    """
    if not names:
        return None
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    inodes = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes.add(inode_of(os.stat(SHM_DIR / name, follow_symlinks=False)))
    spans = [(mapping.start, mapping.end) for mapping in mappings(inodes)]
    found: dict[str, None] = {}
    for variables in _scopes(sys._getframe(1)):
        for name, value in list(variables.items()):
            if not name.startswith("_") and _lies_in(value, spans, torch):
                found[name] = None
    return list(found)


def _scopes(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    """Yield the variables of the user's functions that are running, and of their modules."""
    seen = set()
    while frame is not None:
        home = str(frame.f_globals.get("__name__"))
        if home.partition(".")[0] != _PACKAGE:
            if sys.version_info >= (3, 13):
                # Before, this makes a dict that keeps the values alive until the function ends.
                yield frame.f_locals
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                yield frame.f_globals
        frame = frame.f_back


def _lies_in(value: Any, spans: Collection[tuple[int, int]], torch: Any) -> bool:
    with contextlib.suppress(Exception):  # a variable may be anything, and raise anything
        for tensor in _tensors(value, torch, _DEPTH):
            address = tensor.untyped_storage().data_ptr()
            if any(start <= address < end for start, end in spans):
                return True
    return False


def _tensors(value: Any, torch: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif depth:
        for each in itertools.islice(_parts(value), _MAX_PARTS):
            yield from _tensors(each, torch, depth - 1)


def _parts(value: Any) -> Iterator[Any]:
    if any(base.__module__.startswith("diffusers.") for base in type(value).__mro__):
        value = getattr(value, "components", None)
    if isinstance(value, dict):
        value = list(value.values())
    return iter(value if isinstance(value, list | tuple) else ())
