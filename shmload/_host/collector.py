"""Python's cyclic garbage collector, kept out of the way of imports and builds."""

import contextlib
import gc
import threading
from collections.abc import Iterator

_has_frozen = False
_lock = threading.Lock()
_pauses = 0
_was_enabled = False


def freeze_imports() -> None:
    """Take all objects there are out of the collector's sight, for good.

    After the imports of a cold process these are a million that live as long as it does: no later
    collection, nor those at its end, shall visit them (0.2 s each; a second at exit).
    """
    global _has_frozen
    _has_frozen = True
    gc.freeze()


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Keep the cyclic collector off: imports and builds make many objects and no garbage.

    It is 35 to 40 % of the time of a load of many tensors. Turned on again, its first run would
    visit all of them (0.2 s); a freeze and its undoing count them as old instead, at no cost.

    Of threads that load at the same time the first turns it off and the last on again.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0:
                _resume()


def _resume() -> None:
    # The undoing would undo an earlier freeze too, ours or the user's own. Counting what is frozen
    # walks it (0.05 s for what a cold process imports).
    if not _has_frozen and gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()
    if _was_enabled:
        gc.enable()
