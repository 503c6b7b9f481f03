"""The call that has made a pipeline or model, so that it can be made again of another source.

Guarantee: what is noted neither keeps a pipeline, a model or a component alive, nor shows in one.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

from shmload._checkpoints.wanted import is_publication

_Load = TypeVar("_Load", bound=Callable[..., Any])

# What another call does not repeat: the source; where the weights go, since those of another source
# are copied to where the first are; what a caller watches; and objects that have weights.
_LEFT_OUT = {
    "collection",
    "components_manager",
    "device_map",
    "max_host_memory",
    "max_memory",
    "output_loading_info",
    "progress",
    "source",
    "state_dict",
}


class Call(NamedTuple):
    """A call of `load_pipeline` or `load_model`, without its source."""

    load: Callable[..., Any]
    arguments: Mapping[str, Any]
    passed: tuple[str, ...] = ()
    """The names of components that the caller has passed in as objects."""


_calls: dict[int, Call] = {}
"""By the id of what the call has returned, until that dies."""


def call_of(thing: object) -> Call | None:
    """Return the call that has made a pipeline or model; None if none is known."""
    return _calls.get(id(thing))


def noted(load: _Load) -> _Load:
    """Have a function note its calls, but for those of publications: these have no arguments."""
    names = load.__code__.co_varnames  # the first are those that may be given by place

    @functools.wraps(load)
    def load_and_note(*args: Any, **kwargs: Any) -> Any:
        made = load(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not is_publication(given["source"]):
            _note(made[0] if isinstance(made, tuple) else made, load, given)
        return made

    return cast("_Load", load_and_note)


def _note(made: Any, load: Callable[..., Any], given: Mapping[str, Any]) -> None:
    # A pipeline's configuration names its components; a model has none.
    parts = (
        vars(made).keys() & getattr(made, "config", ()) if hasattr(type(made), "components") else ()
    )
    passed = tuple(name for name in parts if given.get(name) is not None)
    kept = {k: v for k, v in given.items() if k not in _LEFT_OUT and k not in passed}
    _calls[id(made)] = Call(load, kept, passed)
    weakref.finalize(made, _calls.pop, id(made), None).atexit = False
