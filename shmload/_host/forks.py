"""Forked children lack OpenMP's threads; torch would hang in its first parallel operation.

OpenMP keeps its threads between operations. A forked child inherits its record of them but not the
threads, so the first operation that is divided among them never ends. With one thread torch waits
for none.
"""

import os
import sys
import threading

from shmload._wording import logger_of

logger = logger_of(__name__)

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
