"""What loads change for their whole process while they run, and what a forked child resets.

A forked child has no thread but the one that forked. What another thread would have undone stays in
the child: a lock that nothing gives back, a collector that is off, a patched function. Everything
of that kind is a row of one table here.

Python locks each module while a thread imports it. In a child that lock stays, and an import of the
same module waits for ever. The libraries have locks too, which a child finds as they were.
"""

import concurrent.futures.thread  # noqa: F401 what it does before a fork has to come after ours
import contextlib
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from shmload._wording import logger_of

logger = logger_of(__name__)

_Reentrant = type(threading.RLock())
_bootstrap: Any = importlib._bootstrap
_LOCKS = (type(threading.Lock()), _Reentrant)


class Row(NamedTuple):
    """One state of the whole process."""

    name: str
    read: Callable[[], object]
    """Returns the state. It is the same before and after each change, and in a child that forked
    during one."""


table: dict[str, Row] = {}


def add_row(name: str, read: Callable[[], object], reset: Callable[[], None]) -> None:
    """Add a state that threads change for a time.

    Args:
        name: says what it is.
        read: as in `Row`.
        reset: called in each forked child, by its only thread. It undoes what threads have changed
            that the child lacks; what the forking thread itself has changed stays.
    """
    table[name] = Row(name, read)
    os.register_at_fork(after_in_child=reset)


def add_lock(name: str) -> Any:
    """Return a new reentrant lock that is free in forked children, unless their thread has it."""
    lock = threading.RLock()
    add_row(name, lambda: _is_free(lock), lambda: free(lock))
    return lock


def free(lock: Any) -> None:
    """Free a lock that a thread held which this forked child lacks.

    Args:
        lock: a reentrant lock, or a plain one that the forking thread does not hold.
    """
    if not (isinstance(lock, _Reentrant) and lock._is_owned()):  # type: ignore[attr-defined]
        lock._at_fork_reinit()


def _is_free(lock: Any) -> bool:
    is_free: bool = lock.acquire(blocking=False)
    if is_free:
        lock.release()
    return is_free


@contextlib.contextmanager
def forks_wait() -> Iterator[None]:
    """Have forks in other threads wait for the end of the block, for some seconds at most.

    For blocks of some tenths of a second, as to build a model, which patches torch. `subprocess`
    waits until a pipe has no other end; a child that is forked meanwhile would keep that end.
    """
    with _forking:
        yield


_FORK_TIMEOUT_S = 5.0
_forking = threading.RLock()
# Of each thread: whether its fork has the lock.
_fork = threading.local()


def _begin_fork() -> None:
    _fork.has_lock = _forking.acquire(timeout=_FORK_TIMEOUT_S)


def _end_fork() -> None:
    if getattr(_fork, "has_lock", False):
        _fork.has_lock = False
        _forking.release()


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_fork)
os.register_at_fork(after_in_child=lambda: free(_forking))  # was not free in time


class Change:
    """A state that is changed as long as some thread needs it so; a row of the table.

    The first thread changes it, and the last one restores it. In a forked child those that it lacks
    need it no more.

    Args:
        name: as for `add_row`.
        read: likewise.
        make: makes the change; called for each thread, so again where it is made already. None if
            other code makes and undoes it in the block.
        restore: undoes the change; gets what `read` returned before the first `make`. It may be
            called again, and where nothing or half is made. Without `make` only in a forked child.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[], Any],
        make: Callable[[], None] | None,
        restore: Callable[[Any], None],
    ) -> None:
        self._read = read
        self._make = make
        self._restore = restore
        self._lock = threading.RLock()
        self._needs: list[tuple[int, Any]] = []
        """Of each block: its thread, and the value that it gave."""
        # Empty if nothing is to be restored. A child finds it filled before anything is changed,
        # and emptied after all is restored.
        self._before: list[Any] = []
        add_row(name, read, self._reset)

    @contextlib.contextmanager
    def made(self, value: Any = None) -> Iterator[None]:
        """Make the change for a block; `values` has the value meanwhile."""
        need = (threading.get_ident(), value)
        try:
            with self._lock:
                self._needs.append(need)
                if not self._before:
                    self._before.append(self._read())
                if self._make:
                    self._make()
            yield
        finally:
            with self._lock:
                if need in self._needs:  # or it was interrupted before
                    self._needs.remove(need)
                self._settle(is_child=False)

    def values(self) -> list[Any]:
        """Return the values of the blocks that are open now, the oldest first."""
        return [value for _, value in tuple(self._needs)]

    def _settle(self, *, is_child: bool) -> None:
        if self._before and not self._needs:
            if self._make or is_child:
                self._restore(self._before[0])
            self._before.clear()

    def _reset(self) -> None:
        free(self._lock)
        self._needs = [need for need in self._needs if need[0] == threading.get_ident()]
        self._settle(is_child=True)


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


# OpenMP -------------------------------------------------------------------------------------------

# OpenMP keeps its threads between operations. A forked child inherits its record of them but not
# the threads, so torch's first operation that is divided among them never ends. With one thread it
# waits for none.
# Whether this process ever had threads other than Python's when it forked. Some libraries end
# theirs at the first fork; later children are treated like the first.
_has_had_threads = False
# torch's number of threads in the parent, if they may be missing here; 0 otherwise.
_inherited = 0


def limit_inherited_threads() -> None:
    """Let torch use one thread in a forked child that may lack the others.

    A child that has set a number of threads keeps it. A second call does nothing.
    """
    global _inherited
    inherited, _inherited = _inherited, 0
    if inherited > 1:
        import torch

        if torch.get_num_threads() == inherited:
            logger.info("forked with torch's threads running: one thread here")
            torch.set_num_threads(1)


def _look_for_threads() -> None:
    global _has_had_threads
    if len(os.listdir("/proc/self/task")) > threading.active_count():
        _has_had_threads = True


def _note_threads() -> None:
    global _inherited
    torch = sys.modules.get("torch")
    count = getattr(torch, "get_num_threads", None)  # another thread may be importing it
    if count and _has_had_threads:
        _inherited = count()


os.register_at_fork(before=_look_for_threads, after_in_child=_note_threads)
