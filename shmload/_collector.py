"""Python's cyclic garbage collector, kept out of the way of imports and builds."""

import contextlib
import gc
from collections.abc import Iterator


def freeze_imports() -> None:
    """Take all objects there are out of the collector's sight, for good.

    After the imports of a cold process these are a million that live as long as it does: no later
    collection, nor those at its end, shall visit them (0.2 s each; a second at exit).
    """
    gc.freeze()


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Keep the cyclic collector off: imports and builds make many objects and no garbage.

    It is 35 to 40 % of the time of a load of many tensors. Turned on again, its first run would
    visit all of them (0.2 s); a freeze and its undoing count them as old instead, at no cost.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # or the undoing would undo the user's own
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()
