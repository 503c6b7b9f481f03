"""Forks while other threads are at work: which wait, and what a forked child resets.

A forked child has no thread but the one that forked. What another thread would have undone stays in
the child: a lock that nothing gives back, a collector that is off. What shmload itself holds is
reset there. A child that is forked while another thread imports a library cannot import it: Python
keeps the lock of that module, and waits for ever.
"""

import concurrent.futures.thread  # noqa: F401 what it does before a fork has to come after ours
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from shmload._wording import logger_of

logger = logger_of(__name__)


def add_lock() -> Any:
    """Return a new reentrant lock that is free in forked children, unless their thread has it."""
    lock = threading.RLock()
    os.register_at_fork(after_in_child=lambda: _free(lock))
    return lock


def _free(lock: Any) -> None:
    if not lock._is_owned():
        lock._at_fork_reinit()


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
# Whether the fork of this thread has the lock.
_fork = threading.local()


def _begin_fork() -> None:
    _fork.has_lock = _forking.acquire(timeout=_FORK_TIMEOUT_S)


def _end_fork() -> None:
    if getattr(_fork, "has_lock", False):
        _fork.has_lock = False
        _forking.release()


os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_fork)
os.register_at_fork(after_in_child=lambda: _free(_forking))  # was not free in time

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
