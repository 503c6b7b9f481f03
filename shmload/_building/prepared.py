"""Pipelines that were loaded before their program started; `shmload._preparing` loads them.

`load_pipeline` returns one if the arguments, the source's files, the code and the settings are the
same, and its segments are still there.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from shmload._checkpoints.source import INDEX
from shmload._segments.parking import CannotResume, DescriptorClosed
from shmload._wording import logger_of
from shmload.errors import ShmloadError

logger = logger_of(__name__)

_MAX_NAMES = 20_000


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A call of `load_pipeline` that can be made ahead."""

    source: str
    is_path: bool
    """Whether the source was given as a path object."""
    folder: str
    """The directory that a relative source is relative to; empty for an absolute one."""
    dtype: str | None
    is_torch_dtype: bool
    keep: bool | str
    pipeline_class: str | None
    is_class: bool
    """Whether the class itself was given; then it is one of diffusers'."""
    modules: tuple[str, ...] = ()
    """The modules that the call has imported; not compared."""

    def same_call(self, other: "Request") -> bool:
        """Tell whether another call has the same arguments."""
        return msgspec.structs.replace(other, modules=self.modules) == self


def encode(request: Request) -> str:
    """Return a request as a text; two of the same call are the same text."""
    return msgspec.json.encode(msgspec.structs.replace(request, modules=())).decode()


def decode(text: str, modules: Sequence[str] = ()) -> Request:
    """Return the request of a text, with the modules that its load has imported.

    Raises:
        ValueError: it is none.
    """
    request = msgspec.json.decode(text, type=Request)
    return msgspec.structs.replace(request, modules=tuple(modules))


class Prepared(NamedTuple):
    """A pipeline that waits for its program."""

    request: Request
    """What it was loaded for."""
    pipeline: Any
    """Its segments are given up."""
    facts: Any
    """What its build depends on."""
    parked: Any
    """Its segments."""
    draw: Callable[[], None]
    """Draws the random numbers that the load has drawn."""


class Hidden(Protocol):
    """The modules that the template of this process has imported and the program has not."""

    def __contains__(self, name: object, /) -> bool:
        """Tell whether a module has been out of the program's reach."""

    def give(self, names: Iterable[str]) -> None:
        """Import some of them at once; leave what needs an import of its own."""


_waiting: list[Prepared] = []
_stale: list[Request] = []
hidden: Hidden | None = None
"""Set in copies of templates."""
on_load: Callable[[Request, str], None] | None = None
"""Told of each load that could be made ahead, and whether it was: `prepared`, `loaded`, or `stale`
if what was prepared did not hold any more. Set in copies of templates."""


def request_of(
    source: str | os.PathLike[str],
    dtype: object,
    keep: object,
    pipeline_class: object,
    **others: Any,
) -> Request | None:
    """Return a call as a request; None if it cannot be made ahead, or nothing would make it.

    Args:
        source: as given.
        dtype: as given.
        keep: as given.
        pipeline_class: as given.
        others: all other arguments; each must be None or False.
    """
    if on_load is None or any(value not in (None, False) for value in others.values()):
        return None
    torch = sys.modules.get("torch")
    is_torch_dtype = torch is not None and isinstance(dtype, torch.dtype)
    if not (dtype is None or isinstance(dtype, str) or is_torch_dtype):
        return None
    is_class = isinstance(pipeline_class, type)
    if is_class:
        pipeline_class = _name_in_diffusers(pipeline_class)
        if pipeline_class is None:
            return None
    if not isinstance(keep, bool | str) or not isinstance(pipeline_class, str | None):
        return None
    path = os.fspath(source)
    if not os.path.isdir(path):
        return None
    return Request(
        source=path,
        is_path=not isinstance(source, str),
        folder="" if os.path.isabs(path) else os.getcwd(),
        dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,
        is_torch_dtype=is_torch_dtype,
        keep=keep,
        pipeline_class=pipeline_class,
        is_class=is_class,
    )


def note(request: Request | None, before: Sequence[str]) -> None:
    """Tell the template that a call has succeeded.

    Args:
        request: the call; None if it cannot be made ahead.
        before: names of the modules that were imported before it.
    """
    if on_load is None or request is None:
        return
    known = {*before, "__mp_main__"}  # which is the program
    names = tuple(name for name in list(sys.modules) if name not in known)
    if len(names) <= _MAX_NAMES:
        is_stale = any(request.same_call(each) for each in _stale)
        request = msgspec.structs.replace(request, modules=names)
        on_load(request, "stale" if is_stale else "loaded")


def claim(request: Request | None) -> Any:
    """Return the pipeline that was loaded for a call; None if there is none, or it does not hold.

    A pipeline is returned once.
    """
    found = _take(request)
    if found is None:
        return None
    reason = _why_not(found)
    if reason:
        logger.info("%s: not as it was prepared: %s", found.request.source, reason)
        return None
    if hidden is not None:
        hidden.give(found.request.modules)
    for name in found.request.modules:
        if name not in sys.modules:
            importlib.import_module(name)
    found.draw()
    _show_bar(found.pipeline)
    logger.info("%s: prepared before the program started", found.request.source)
    if on_load is not None:
        on_load(found.request, "prepared")
    return found.pipeline


def note_versions() -> None:
    """Note the state of all code for the claims of programs; call it when nothing changes any."""
    for found in _waiting:
        found.facts.note_versions()


def put(prepared: Prepared) -> None:
    """Keep a pipeline for the program that this process becomes."""
    _waiting.append(prepared)


def drop() -> None:
    """Forget what was prepared: the program is another one."""
    _waiting.clear()


def _take(request: Request | None) -> Prepared | None:
    """Take what was loaded for a call out of the list; threads may ask at once."""
    for found in list(_waiting):
        if request and found.request.same_call(request):
            with contextlib.suppress(ValueError):  # another thread was quicker
                _waiting.remove(found)
                return found
    return None


def _why_not(prepared: Prepared) -> str | None:
    """Return why a pipeline cannot be used; otherwise take its segments back."""
    try:
        if reason := prepared.facts.why_changed(() if hidden is None else hidden):
            if prepared.facts.has_other_files():
                _stale.append(prepared.request)
            return str(reason)
        prepared.parked.resume()
    except DescriptorClosed as exc:  # by this program: the next one may use what is prepared
        return str(exc)
    except (CannotResume, ShmloadError, OSError) as exc:
        _stale.append(prepared.request)
        return str(exc)
    return None


def _name_in_diffusers(kind: Any) -> str | None:
    """Return the name by which diffusers has a class; None if it has not."""
    name = str(kind.__name__)
    return name if getattr(sys.modules.get("diffusers"), name, None) is kind else None


def _show_bar(pipeline: Any) -> None:
    """Show the bar that diffusers shows while it loads the components of an ordinary pipeline."""
    if pipeline.config_name != INDEX:
        return
    from diffusers.utils import logging as diffusers_logging

    entries = pipeline.config.values()  # of a component: its library and class
    count = len([each for each in entries if isinstance(each, tuple | list) and each[0]])
    for _ in diffusers_logging.tqdm(range(count), desc="Loading pipeline components..."):
        pass
