"""The judge's forked processes: each has a deadline and limits, and ends with its parent."""

import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import TypeVar

from shmload._building.queued import Refused
from shmload._host.changes import limit_inherited_threads
from shmload._ipc.procs import die_with_parent

_T = TypeVar("_T")
# The whole of one request, on a machine that has other work.
_DEADLINE_S = 300
# Processor time of one process, in seconds.
_MOST_CPU_S = 60


def in_child(function: Callable[[], _T]) -> _T:
    """Call a function in a forked child, and return what it returned.

    Raises:
        Refused: the child raised it.
        RuntimeError: the child failed otherwise.
    """
    with tempfile.TemporaryFile() as file:
        _, status = os.waitpid(fork(lambda: _answer(function, file.fileno())), 0)
        file.seek(0)
        content = file.read()
    if status or not content:
        raise RuntimeError(f"a child ended with {os.waitstatus_to_exitcode(status)}")
    # From the own child, in a file that has no name.
    answer = pickle.loads(content)
    if isinstance(answer, str):
        raise Refused(answer)
    result: _T = answer[0]
    return result


def _answer(function: Callable[[], object], fd: int) -> None:
    try:
        answer: object = (function(),)
    except Refused as exc:
        answer = str(exc)
    with open(fd, "wb", closefd=False) as file:
        file.write(pickle.dumps(answer))


def fork(function: Callable[[], None]) -> int:
    """Call a function in a forked child, within the limits; return its number."""
    child = os.fork()
    if child:
        return child
    # The child ends without the end that an interpreter has.
    try:
        die_with_parent()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_DEADLINE_S)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the kernel would write all its memory
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_CPU_S, _MOST_CPU_S + 5))
        limit_inherited_threads()
        function()
        os._exit(0)
    except BaseException:
        if os.environ.get("SHMLOAD_JUDGE_TRACEBACK"):
            traceback.print_exc()
            sys.stderr.flush()
    finally:
        os._exit(1)
