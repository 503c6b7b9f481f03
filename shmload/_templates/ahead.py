"""What a spare does ahead of its program, while nothing waits for it.

A step is called in every new spare, with all modules of the template in place, before they are
hidden. What it returns is kept here, and the program that the spare becomes can take it. A step may
not start threads or touch a GPU; one that raises is left out, and the spare serves without it.
"""

from collections.abc import Callable
from typing import Any

_steps: dict[str, Callable[[], Any]] = {}
_results: dict[str, Any] = {}


def add_step(name: str, step: Callable[[], Any]) -> None:
    """Have the spares that are forked from now on call a function; call this in the template.

    Args:
        name: of its result; another step of this name is replaced.
        step: what is done. It ends soon, or programs that come meanwhile do not wait for it.
    """
    _steps[name] = step


def remove_step(name: str) -> None:
    """Have no more spares call a step, if there is one of this name."""
    _steps.pop(name, None)


def has_steps() -> bool:
    """Tell whether there is anything to do."""
    return bool(_steps)


def take(name: str) -> Any:
    """Return what a step has returned in this process, once; None if nothing."""
    return _results.pop(name, None)


def work_ahead() -> None:
    """Do all steps."""
    for name, step in _steps.items():
        try:
            _results[name] = step()
        except Exception:  # the program does without it
            continue
