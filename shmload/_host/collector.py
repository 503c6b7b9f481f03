"""What keeps objects alive: the garbage collector, which is off during builds, and errors."""

import contextlib
import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

from shmload._host.changes import add_lock

# inspect.CO_GENERATOR, CO_COROUTINE, CO_ASYNC_GENERATOR: to clear their frames would end them.
_PAUSES = 0x20 | 0x80 | 0x200
_IMPORTS = "<frozen importlib._bootstrap>"

_has_frozen = False
_is_marking = False


@contextlib.contextmanager
def freezing_imports() -> Iterator[None]:
    """Hide all objects from the collector, for good, after a block that imports the libraries.

    The imports of a cold process leave a million objects that live as long as it does. To visit
    them would take each later collection 0.2 s, and those at exit a second.

    What the program has dropped before goes first: frozen, it would stay. That takes 2 ms, with
    torch imported 0.08 s, and 0.1 s more for each million objects of the program.
    """
    if "diffusers" in sys.modules:
        yield
        return
    gc.collect()
    yield
    _forget_imports()
    freeze()


def freeze() -> None:
    """Hide all present objects from the collector, for good, and remember that some are hidden."""
    global _has_frozen
    gc.freeze()
    _has_frozen = True


def _forget_imports() -> None:
    """Clear the locals of functions that imports have called below the functions that now run.

    An import that kept an error in a variable left a circle: the error, its traceback, the frame.
    Frozen, it would never go; and a frame keeps its callers, with all that they will have made.
    """
    running = set()
    frame: FrameType | None = sys._getframe()
    while frame:
        running.add(frame)
        frame = frame.f_back
    for each in gc.get_objects():
        if type(each) is FrameType and each not in running and not each.f_code.co_flags & _PAUSES:
            caller, is_import = each.f_back, False
            while caller and caller not in running:
                is_import = is_import or caller.f_code.co_filename == _IMPORTS
                caller = caller.f_back
            if caller and is_import:
                each.clear()
    running.clear()  # it has this call's frame, which has it: such a circle, too


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Keep the collector off: imports and builds make many objects and no garbage.

    It would take 35 to 40 % of the time of a load of many tensors, and 0.2 s of a recall by the
    full collection that importing the libraries leaves due. Its first run afterwards would visit
    all new objects (0.2 s); freezing and unfreezing them marks them as old, at no cost.

    If several threads load at once, the first turns it off and the last turns it on again. A forked
    child needs it off only for the thread that has forked.
    """
    here = threading.get_ident()
    try:
        with _lock:
            _pause(here)
        yield
    finally:
        with _lock:
            if here in _pausing:  # or it was interrupted before
                _pausing.remove(here)
            _settle()


@contextlib.contextmanager
def resumed_gc() -> Iterator[None]:
    """Give this thread's pauses back while it waits: a download may take minutes."""
    here = threading.get_ident()
    with _lock:
        count = _pausing.count(here)
        _pausing[:] = [each for each in _pausing if each != here]
        _settle()
    try:
        yield
    finally:
        with _lock:
            for _ in range(count):
                _pause(here)


_lock = add_lock()
# The threads that need the collector off, and whether it was on before the first.
_pausing: list[int] = []
_before: list[bool] = []


def _pause(here: int) -> None:
    if not _pausing:
        _before.append(gc.isenabled())
    _pausing.append(here)
    gc.disable()


def _settle() -> None:
    """Turn the collector on again, if it was, once no thread needs it off."""
    if _before and not _pausing:
        _resume(_before[0])
        _before.clear()


def _settle_in_child() -> None:
    here = threading.get_ident()
    _pausing[:] = [each for each in _pausing if each == here]
    _settle()


os.register_at_fork(after_in_child=_settle_in_child)


def _resume(was_enabled: bool) -> None:
    global _is_marking
    # Unfreezing would also undo an earlier freeze, ours or the user's. Counting the frozen objects
    # visits each (0.05 s for those of the libraries), so ours are not counted.
    if _is_marking or (not _has_frozen and gc.get_freeze_count() == 0):
        _is_marking = True  # also in a child that is forked between these two
        gc.freeze()
        gc.unfreeze()
        _is_marking = False
    if was_enabled:
        gc.enable()


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
