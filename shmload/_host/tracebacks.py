"""The errors that led to an error, and the locals that all of them keep alive."""

import traceback
from collections.abc import Iterator

_MAX_ERRORS = 20  # of one chain; they can be cyclic


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and then those that it came from; 20 at most."""
    for _ in range(_MAX_ERRORS):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def forget_locals(error: BaseException, before: BaseException | None) -> None:
    """Clear the locals of the functions that an error ended, its causes and contexts too.

    Functions that still run keep theirs.

    Args:
        error: caught by the caller.
        before: what `sys.exception()` was when the caller began: an error that the caller did not
            cause, whose functions keep their locals; None for none.
    """
    seen = {id(before)}
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
