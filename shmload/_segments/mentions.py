"""Puts the source's path in the place of a view's in an error, and in those that led to it."""

from collections.abc import Callable

from shmload._host.tracebacks import chain_of


def repair_errors(error: BaseException | None, repair: Callable[[str], str]) -> None:
    """Repair the texts of an error and of its causes.

    Args:
        error: changed in place.
        repair: returns a text with the right paths.
    """
    for found in chain_of(error):
        found.args = tuple(repair(each) if isinstance(each, str) else each for each in found.args)
        if isinstance(found, OSError) and isinstance(found.filename, str):
            found.filename = repair(found.filename)
