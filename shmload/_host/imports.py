"""What the imports of other threads leave in a forked child: locks, and modules that are half made.

Python locks each module while a thread imports it. In a child that lock stays, and an import of the
same module waits for ever. The libraries have locks too, which a child finds as they were.
"""

import importlib
import sys
import threading
import types
from collections.abc import Collection, Iterator
from typing import Any

from shmload._host.changes import free

_bootstrap: Any = importlib._bootstrap
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def modules_in_work() -> list[str]:
    """Return the names of the modules that other threads are importing now, or did at the fork."""
    here = threading.get_ident()
    return [name for name, lock in _module_locks() if lock.owner not in (None, here)]


def give_up_imports() -> None:
    """Forget in a forked child the modules that other threads were importing.

    An import makes them anew. Modules that were complete stay.
    """
    for name in modules_in_work():
        del _bootstrap._module_locks[name]
        module = sys.modules.get(name)
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            del sys.modules[name]
        elif module is not None:  # only its package does not have it yet
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, sys)).setdefault(child, module)


def free_locks(packages: Collection[str]) -> None:
    """Free in a forked child the locks that modules of some packages have."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and isinstance(module, types.ModuleType):
            for value in list(vars(module).values()):
                if type(value) in _LOCKS:
                    free(value)


def _module_locks() -> Iterator[tuple[str, Any]]:
    for name, reference in list(_bootstrap._module_locks.items()):
        if (lock := reference()) is not None:
            yield name, lock
