"""Finds what of this process holds tensors in segments, for a message to the user.

These are variables; in IPython the outputs of cells (`Out`, `_`, `_3`), which `del` does not free;
and the traceback of the last error, whose functions still have their variables.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from shmload._host.linux import SHM_DIR, inode_of
from shmload._host.procfs import mappings, mappings_below
from shmload._host.tracebacks import chain_of
from shmload._segments.names import name_prefix

_PACKAGE = __name__.partition(".")[0]
# In lists and dicts, and in the components of a pipeline, the models are this deep.
_DEPTH = 2
# IPython 9.18: `%reset -f out` keeps the last outputs there, and no later output replaces them.
_LAST_OUTPUTS = ("_", "__", "___")
_FORGET_HIDDEN = "get_ipython().user_ns_hidden.update(_='', __='', ___='')"
_MAX_PARTS = 10_000  # of a list or dict
_Spans = list[tuple[int, int]]


class Holders(NamedTuple):
    """What holds segments in this process."""

    variables: tuple[str, ...] = ()
    """The names of variables; outputs of IPython's cells that have no other name are among them."""
    displayed: tuple[str, ...] = ()
    """Those of the variables that IPython's outputs hold too."""
    error: str = ""
    """The type of the last error, if its traceback holds some."""
    has_hidden: bool = False
    """Whether IPython holds some in a place that `%reset -f out` leaves as it is."""

    @property
    def remedy(self) -> str:
        """What the user can do about them, as a part of a sentence; empty if nothing was found."""
        ways = []
        plain = [name for name in self.variables if name not in self.displayed]
        if plain:
            ways.append(f"`del {', '.join(plain)}`")
        if self.displayed:
            # It also frees the outputs and `_`. `del Out` would only break IPython.
            lines = ", ".join(f"`%xdel {name}`" for name in self.displayed)
            ways.append(
                f"{lines} (a cell has displayed {'it' if len(self.displayed) == 1 else 'them'})"
            )
        if self.has_hidden:
            ways.append(f"`{_FORGET_HIDDEN}` (a cell had displayed it before `%reset`)")
        if self.error:
            ways.append(
                f"let another error take the place of the last one ({self.error}), whose traceback "
                "holds weights: `1/0` does"
            )
        return " and ".join(ways)


def holders_of(names: Collection[str] | None) -> Holders:
    """Return what holds segments in the calling functions, their modules and `__main__`.

    A variable counts if it is a tensor or a model, a pipeline, dict or list of these, or an object
    of a class made in `__main__` that has such attributes. Imports nothing: without torch there
    are no tensors.

    Args:
        names: of segments that this process holds; None for all that it maps, those without a name
            too.
    """
    torch = sys.modules.get("torch")
    spans = _spans_of(names) if torch else []
    if not spans:
        return Holders()
    # By object: in IPython one `%xdel` deletes all names of an object, and its outputs.
    found: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    hidden: list[Any] = []
    for variables in _scopes(sys._getframe(1)):
        is_ipython = "get_ipython" in variables and isinstance(variables.get("Out"), dict)
        for name, value in list(variables.items()):
            if name.startswith("_") or (is_ipython and name == "Out"):
                continue
            if _lies_in(value, spans, torch):
                found[name] = value
        if is_ipython:
            shown = {f"_{number}": value for number, value in list(variables["Out"].items())}
            shown |= {name: variables.get(name) for name in _LAST_OUTPUTS}
            kept = getattr(variables["get_ipython"](), "user_ns_hidden", {})
            hidden += [
                value for name in _LAST_OUTPUTS if _lies_in(value := kept.get(name), spans, torch)
            ]
            outputs |= {name: v for name, v in shown.items() if _lies_in(v, spans, torch)}
    displayed = []
    named = {id(value): name for name, value in reversed(found.items())}
    for name, value in outputs.items():
        if id(value) not in named:
            named[id(value)] = name
            found[name] = value
        if named[id(value)] not in displayed:
            displayed.append(named[id(value)])
    is_shown = {id(value) for value in outputs.values()}
    return Holders(
        tuple(found),
        tuple(displayed),
        _last_error(spans, torch, found.values()),
        has_hidden=any(id(value) not in is_shown for value in hidden),
    )


def _spans_of(names: Collection[str] | None) -> _Spans:
    """Return where this process maps segments: addresses in bytes."""
    if names is None:
        return mappings_below(name_prefix())
    inodes = set()
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            inodes.add(inode_of(os.stat(SHM_DIR / name, follow_symlinks=False)))
    return [(mapping.start, mapping.end) for mapping in mappings(inodes)]


def _scopes(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    """Yield the variables of the user's functions that are running, and of their modules."""
    seen = set()
    while frame is not None:
        if _is_users(frame):
            if sys.version_info >= (3, 13):
                # Before, this makes a dict that keeps the values alive until the function ends.
                yield frame.f_locals
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                yield frame.f_globals
        frame = frame.f_back
    main = vars(sys.modules["__main__"])
    if id(main) not in seen:
        yield main


def _is_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] != _PACKAGE


def _last_error(spans: _Spans, torch: Any, known: Collection[Any]) -> str:
    """Return the type of the last error that was shown, if its traceback alone holds something."""
    ids = {id(value) for value in known}
    last = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    for error in chain_of(last):
        for frame in _frames_of(error.__traceback__):
            # The functions have ended: what reads their variables keeps nothing alive for longer.
            values = [] if frame.f_locals is frame.f_globals else list(frame.f_locals.values())
            if any(id(each) not in ids and _lies_in(each, spans, torch) for each in values):
                return type(last).__name__
    return ""


def _frames_of(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _lies_in(value: Any, spans: _Spans, torch: Any) -> bool:
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
    elif type(value).__module__ == "__main__":  # an object of a class that a cell has made
        value = getattr(value, "__dict__", None)
    if isinstance(value, dict):
        value = list(value.values())
    return iter(value if isinstance(value, list | tuple) else ())
