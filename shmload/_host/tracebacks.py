"""What an error keeps alive: the locals of the functions that it passed through."""

import traceback


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
