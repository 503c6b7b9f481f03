"""Puts the source's path in the place of a view's in an error, and in those that led to it."""

from collections.abc import Callable

_MAX_ERRORS = 20  # of one chain; they can be cyclic


def repair_errors(error: BaseException | None, repair: Callable[[str], str]) -> None:
    """Repair the texts of an error and of its causes.

    Args:
        error: changed in place.
        repair: returns a text with the right paths.
    """
    for _ in range(_MAX_ERRORS):
        if error is None:
            return
        error.args = tuple(repair(each) if isinstance(each, str) else each for each in error.args)
        if isinstance(error, OSError) and isinstance(error.filename, str):
            error.filename = repair(error.filename)
        error = error.__cause__ or error.__context__
