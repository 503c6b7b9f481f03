"""What imports change in the interpreter, beside making modules: read, taken back, done again."""

import _warnings
import logging
import os
import sys
import warnings
from typing import Any

State = dict[str, list[Any]]
Changes = list[tuple[str, list[Any], list[Any]]]


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
    return found | {"environ": list(os.environ.items())}


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
        else:
            items = _lists()[name]
            items[:] = [item for item in items if item not in went]
            # Filters are put in front, and so are most finders and paths.
            items[:0] = [item for item in came if item not in items]
    _warnings._filters_mutated()  # type: ignore[attr-defined]
