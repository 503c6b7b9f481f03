"""What forked children would wait for in vain: torch's threads, which stayed with their parent.

OpenMP keeps its threads between two computations. A forked child has its notes of them, and not the
threads: the first computation that is divided among them never ends. torch itself can be told to
use one thread, and then waits for none.
"""

import logging
import os
import sys
import threading

logger = logging.getLogger(__name__)

# Beside Python's own, when this process has forked. Some libraries end theirs at the first fork,
# and children should not differ by that.
_has_had_threads = False
# Of torch in the parent of this process, if they may be missing here.
_inherited = 0


def limit_inherited_threads() -> None:
    """Have torch use one thread, if this is a forked child that may lack more; again is fine.

    Nothing is done in a child that has chosen a number itself.
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
