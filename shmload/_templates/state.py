"""What imports change in the interpreter, beside making modules: read, taken back, done again."""

import _warnings
import atexit
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

# Their finalizers give memory of this process back, and nothing else.
_UNDONE_BY_KERNEL = {"torch.library"}

State = dict[str, list[Any]]
Changes = list[tuple[str, list[Any], list[Any]]]
Exits = list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]]


def _lists() -> State:
    return {
        # `catch_warnings` puts another list into the module for its time.
        "filters": warnings.filters,  # type: ignore[dict-item]
        "path": sys.path,
        "meta_path": sys.meta_path,
        "path_hooks": sys.path_hooks,
        "handlers": logging.root.handlers,
    }


def read_state() -> State:
    """Return what imports change in the interpreter, as lists of comparable items."""
    found = {name: list(items) for name, items in _lists().items()}
    found["finalizers"] = list(weakref.finalize._registry)  # type: ignore[attr-defined]
    found["environ"] = list(os.environ.items())
    return found


def differences(before: State, after: State) -> Changes:
    """Return what has changed, part by part: its name, items that went, and items that came."""
    return [
        (
            name,
            [item for item in before[name] if item not in after[name]],
            [item for item in after[name] if item not in before[name]],
        )
        for name in before
        if before[name] != after[name]
    ]


def change_state(changes: Changes) -> None:
    """Remove some items of each part of the state, and put others in front."""
    for name, went, came in changes:
        if name == "environ":
            for variable, _ in went:
                os.environ.pop(variable, None)
            os.environ.update(came)
        elif name == "finalizers":
            for finalizer in came:
                if alive := finalizer.peek():
                    home = getattr(alive[1], "__module__", None)
                    finalizer.atexit = home not in _UNDONE_BY_KERNEL
        else:
            items = _lists()[name]
            items[:] = [item for item in items if item not in went]
            # Filters are put in front, and so are most finders and paths.
            items[:0] = [item for item in came if item not in items]
    _warnings._filters_mutated()  # type: ignore[attr-defined]


def register_exits(exits: Exits) -> None:
    """Have functions called when Python ends, as an import has asked."""
    for function, args, kwargs in exits:
        atexit.register(function, *args, **kwargs)


def forget_exits(last: Callable[[], None]) -> None:
    """Have nothing called when Python ends, but this after all that a program registers."""
    atexit._clear()
    atexit.register(last)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    # It also tells the finalizers not to run once modules are taken apart.
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
