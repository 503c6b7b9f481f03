"""What a job's fork server has before it forks: the libraries, and the pipeline.

`launch` sets the variable `SETUP` for the standard library's fork server, which imports `preload`
first. Each process that is forked from the server has all that it has prepared.

Guarantee: neither the server nor a process of the job outlives the program. When the program is
gone, however it ended, the server kills its processes, gives back what is shared and ends.
"""

import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from shmload._ipc.procs import die_with_parent
from shmload.errors import JobError
from shmload.integrations.handles import Handle

SETUP = "SHMLOAD_JOB_SETUP"
"""The variable with the server's `Setup`."""

# Forked processes lack the threads that a library starts; a bar would start one; and the wait for
# other ranks of a launcher is none of a job's.
_SINGLE_THREADED = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TQDM_DISABLE": "1",
    "LOCAL_WORLD_SIZE": "1",
}
# Joined threads stay in /proc/self/task briefly; wait this long.
_THREADS_TIMEOUT_S = 5.0


class Setup(NamedTuple):
    """What the processes of a job are made of."""

    handle: str | None
    """The pipeline, as the text of its handle; None for none."""
    preload: tuple[str, ...]
    """Modules to import for all processes."""
    path: tuple[str, ...]
    """Where Python looks for modules."""
    owner: int
    """The process id of the program."""
    device: str
    threads: int
    """Of each process, for torch."""
    seed: int


def pipeline_of(setup: Setup) -> Any:
    """Return the pipeline that the fork server has loaded, in a process forked from it.

    Raises:
        Exception: what loading it has raised.
    """
    pipe, error = _prepare(setup)
    if error:
        raise error
    return pipe


@functools.cache
def _prepare(setup: Setup) -> tuple[Any, Exception | None]:
    """Import the libraries and load the pipeline; return it, or the error of that."""
    before = {name: os.environ.get(name) for name in _SINGLE_THREADED}
    os.environ.update(_SINGLE_THREADED)
    pipe = None
    try:
        if setup.handle is not None:
            from tqdm import tqdm

            tqdm.monitor_interval = 0  # even a disabled bar would start a thread
            pipe = Handle.from_text(setup.handle).load()
        for module in setup.preload:
            importlib.import_module(module)
        if os.getppid() == setup.owner and (left := _count_other_threads()):
            raise JobError(
                f"loading the pipeline, or a module to preload, has left {left} threads running, "
                "and a process with threads cannot be forked; preload fewer modules, or use "
                "processes of your own with a shmload.Handle"
            )
    except Exception as exc:  # the outermost loop: the job must learn of any error
        return None, exc
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
    return pipe, None


def prepare_server(text: str) -> None:
    """Prepare this process, a fork server.

    Args:
        text: its `Setup`, as the variable has it.
    """
    setup: Setup = pickle.loads(bytes.fromhex(text))
    sys.path[:] = setup.path

    def leave_if_alone(*_: object) -> None:
        # The kernel also sends this when the thread ends that started this process.
        if os.getppid() != setup.owner:
            _leave()

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the program
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, leave_if_alone)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # `launch` has blocked SIGINT
    die_with_parent(signal.SIGHUP)
    leave_if_alone()
    _prepare(setup)
    gc.freeze()  # or a collection in a forked process would copy every page that it visits


def _leave(*_: object) -> NoReturn:
    """End the server after its processes, which hold the same shared weights."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    sys.exit(0)  # by way of what is to be given back


def _count_other_threads() -> int:
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while (left := len(os.listdir("/proc/self/task")) - 1) and time.monotonic() < deadline:
        time.sleep(0.001)
    return left
