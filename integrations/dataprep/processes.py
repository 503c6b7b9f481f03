"""The processes of a job: a fork server with the libraries and the pipeline, and what it forks.

The server is the standard library's, one for each job. `ForkServer` starts it; there it imports
`preload`, and so calls `prepare_server`. Each process that is forked from it has all that it has
prepared, and never runs `__main__` again.

Guarantee: after `close` the server and its processes have ended; so they have soon after the
program has ended, in whatever way. The server ends last, and gives back what is shared.
"""

import atexit
import contextlib
import functools
import importlib
import os
import pickle
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from multiprocessing import connection, forkserver, util
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from shmload._host.changes import forks_wait
from shmload._host.collector import freeze
from shmload._host.limits import explained, process_refused, require_file_size
from shmload._host.procs import die_with_parent, how_it_ended
from shmload.errors import JobError
from shmload.integrations.dataprep.crossing import MEMORY_NBYTES, Memory
from shmload.integrations.handles import Handle

SETUP = "SHMLOAD_JOB_SETUP"
"""The variable with what `prepare_server` gets."""

# Forked processes lack the threads that a library starts.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_NAME = "a process of the job"
_END_TIMEOUT_S = 10.0
_THREADS_TIMEOUT_S = 1.0
# A process that sends half a message and then nothing for so long counts as ended: after a kill its
# child may still hold the socket, and a stopped process does not read.
_STUCK_S = 60


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
    """torch's threads in each process."""
    seed: int


class ForkServer(forkserver.ForkServer):
    """The fork server of a job, apart from the program's own; it starts when it is first needed.

    Args:
        setup: what its processes are made of.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.set_forkserver_preload([f"{__package__}.preload"])

    def ensure_running(self) -> None:
        """Start it, also anew if it has ended."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            os.environ[SETUP] = pickle.dumps((self.setup, util.get_temp_dir())).hex()
            with forks_wait():
                super().ensure_running()
        finally:
            os.environ.pop(SETUP, None)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # may raise KeyboardInterrupt

    def close(self) -> None:
        """End it and the processes that it has forked; a second call does nothing."""
        if pid := self._forkserver_pid:  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGTERM)
            # Only the server has the other end of this pipe. A pidfd would need a free descriptor.
            alive: int = self._forkserver_alive_fd  # type: ignore[attr-defined]
            if not connection.wait([alive], _END_TIMEOUT_S):
                os.kill(pid, signal.SIGKILL)
            self._stop()  # type: ignore[attr-defined]


class Process:
    """A process of a job, forked from its server once that is prepared.

    Args:
        server: of the job.
        entry: is pickled; its `_bootstrap` is called in the process, as that of a `Process` of
            multiprocessing. There `inherited` has the other end of the connection, and the memory.

    Attributes:
        connection: to the process.
        memory: that it shares.
        pid: 0 until it has said that it is ready, and `begin` was called.
        sentinel: from then on this descriptor is readable once the process has ended.

    Raises:
        JobError: the fork server has ended.
        CapacityError: a limit of the program forbids it.
    """

    def __init__(self, server: ForkServer, entry: object) -> None:
        self.pid = 0
        with explained(_NAME), contextlib.ExitStack() as if_failed, contextlib.ExitStack() as given:
            require_file_size(_NAME, MEMORY_NBYTES)
            file = given.enter_context(open(os.memfd_create("shmload-job"), "wb"))
            file.truncate(MEMORY_NBYTES)
            self.memory = if_failed.enter_context(contextlib.closing(Memory(file.fileno())))
            ours, theirs = socket.socketpair()
            given.enter_context(theirs)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _STUCK_S, 0))
            self.connection = if_failed.enter_context(connection.Connection(ours.detach()))
            descriptors = [theirs.fileno(), file.fileno()]
            try:
                self.sentinel, start = server.connect_to_new_process(descriptors)
                with open(start, "wb") as told:
                    # What multiprocessing tells a new process, but for the main module.
                    pickle.dump({"sys_path": sys.path}, told)
                    pickle.dump(entry, told)
            except OSError as exc:
                ended = JobError(f"the fork server of the job has ended: {exc}")
                raise process_refused(_NAME, exc) or ended from exc
            if_failed.pop_all()

    def begin(self) -> None:
        """Take its process id, once it is ready; raises an EOFError if its server has ended."""
        self.pid = forkserver.read_signed(self.sentinel)

    def kill(self) -> None:
        """Kill it, unless it has ended. One that is not ready ends when it is."""
        if self.pid and not connection.wait([self.sentinel], 0):
            # Its server has seen its end already, and says so next.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def end(self) -> str:
        """Kill it, and say how it ended, such as `SIGKILL`."""
        self.kill()
        self.connection.close()
        self.memory.close()
        try:
            if not self.pid or not connection.wait([self.sentinel], _END_TIMEOUT_S):
                return "not ended: it waits for a device"
            return how_it_ended(forkserver.read_signed(self.sentinel))
        except EOFError:
            return "ended with its fork server"
        finally:
            os.close(self.sentinel)


def inherited() -> tuple[connection.Connection, Memory]:
    """Return the connection and the memory of this process, which is one of a job."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # the server has handlers
        signal.signal(number, signal.SIG_DFL)
    die_with_parent()
    end, memory = forkserver.get_inherited_fds()  # type: ignore[misc]  # not None here
    return connection.Connection(end), Memory(memory)


# In the server ------------------------------------------------------------------------------------


def prepare_server(text: str) -> None:
    """Prepare this process, a fork server.

    Args:
        text: what `ForkServer` has set the variable to.
    """
    setup, temporary = pickle.loads(bytes.fromhex(text))
    sys.path[:] = setup.path

    def leave(number: int, _: object) -> None:
        # The kernel also sends SIGHUP when the thread ends that started this process.
        if number == signal.SIGTERM or os.getppid() != setup.owner:
            for each in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(each, signal.SIG_IGN)
            if is_loading:
                sys.exit(0)  # the load gives back what it has
            end()  # an exception is lost if this interrupts a callback, such as of a fork

    def end() -> None:
        """End the processes, which hold the weights too; then give those back, and no more."""
        for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)
            os.waitpid(int(pid), 0)
        if os.getppid() != setup.owner:  # no other process removes the folder with the socket
            shutil.rmtree(temporary, ignore_errors=True)
        atexit.unregister(end)
        atexit._run_exitfuncs()
        os._exit(0)  # Python's own end takes a second with these libraries

    is_loading = True
    atexit.register(end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the program
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # `ForkServer` has blocked SIGINT
    die_with_parent(signal.SIGHUP)
    leave(signal.SIGHUP, None)
    prepared(setup)
    atexit.register(end)  # the last that is registered is called first
    is_loading = False
    freeze()  # or a collection in a forked process would copy every page that it visits


def set_threads(count: int) -> None:
    """Set the number of torch's threads in this process, also if torch is imported later."""
    os.environ.update(dict.fromkeys(_THREADS, str(count)))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(count)


@functools.cache
def prepared(setup: Setup) -> tuple[Any, Exception | None]:
    """Import the libraries and load the pipeline; return it, or the error of that.

    A process that is forked from the server finds what the server has returned.
    """
    set_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # to wait for a launcher's other ranks is not a job's
    tqdm.monitor_interval = 0  # even a disabled bar would start a thread
    pipe = None
    try:
        if setup.handle is not None:
            pipe = Handle.from_text(setup.handle).load()
        for module in setup.preload:
            importlib.import_module(module)
        deadline = time.monotonic() + _THREADS_TIMEOUT_S
        for thread in threading.enumerate()[1:]:
            thread.join(max(0.0, deadline - time.monotonic()))
        if left := [thread.name for thread in threading.enumerate()[1:]]:
            raise JobError(
                "loading the pipeline, or a module to preload, has left the threads "
                f"{', '.join(left)}, which forked processes lack; preload fewer modules"
            )
    except Exception as exc:  # the outermost loop: the job must learn of any error
        return None, exc
    return pipe, None
