"""Processes forked from a server that has imported the libraries; they never run `__main__` again.

The server is that of the standard library, one for each job; it imports `preload` first.

Guarantee: after `close` the server and all its processes have ended; so they have soon after the
program has ended, in whatever way.
"""

import io
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import connection, context, forkserver, popen_forkserver, reduction, util
from multiprocessing.context import set_spawning_popen
from typing import Any

from shmload._host.changes import forks_wait
from shmload._ipc.procs import die_with_parent, how_it_ended
from shmload.errors import JobError
from shmload.integrations.dataprep.prepared import SETUP, Setup

_PRELOAD = f"{__package__}.preload"
_LOOK_S = 0.5
_END_TIMEOUT_S = 10.0


class ForkServer(forkserver.ForkServer):
    """The fork server of a job, apart from the program's own; it starts when it is first needed.

    Args:
        setup: what its processes are made of.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.set_forkserver_preload([_PRELOAD])

    def ensure_running(self) -> None:
        """Start it, also anew if it has ended."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            os.environ[SETUP] = pickle.dumps(self.setup).hex()
            with forks_wait():
                super().ensure_running()
        finally:
            os.environ.pop(SETUP, None)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)  # may raise KeyboardInterrupt

    def close(self) -> None:
        """End it and the processes that it has forked; a second call does nothing."""
        pid: int | None = self._forkserver_pid  # type: ignore[attr-defined]
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)
        self._stop()  # type: ignore[attr-defined]


class Process(context.ForkServerProcess):
    """A process of a fork server.

    Args:
        server: stays the caller's.
        target: what it calls; must be importable.
        arguments: of `target`; sockets among them are duplicated.
    """

    def __init__(
        self, server: ForkServer, target: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        super().__init__(target=target, args=arguments, daemon=True)
        self._server = server

    def start(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Start it: as `multiprocessing`, but also in daemonic processes.

        Args:
            on_wait: is called now and then while the fork server is not ready; may raise an error.

        Raises:
            JobError: the fork server has ended.
        """
        try:
            self._popen = _Popen(self, on_wait)
        except (EOFError, OSError) as exc:
            raise JobError(
                f"the fork server of the job has ended ({exc}); what it printed says why, or dmesg "
                "if the kernel ran out of memory"
            ) from exc
        self._sentinel = self._popen.sentinel

    def run(self) -> None:
        """Call the target; end with the fork server."""
        for number in (signal.SIGTERM, signal.SIGHUP):  # the server has handlers
            signal.signal(number, signal.SIG_DFL)
        die_with_parent()
        super().run()

    def end(self) -> str:
        """Kill it if it has not ended, reap it, and say how it ended, such as `SIGKILL`."""
        self.kill()
        self.join(_END_TIMEOUT_S)
        code = self.exitcode
        if code is None:
            return "not ended: it waits for a device"
        self.close()
        return how_it_ended(code)

    def __getstate__(self) -> dict[str, Any]:
        return {k: value for k, value in vars(self).items() if k not in ("_server", "_popen")}


class _Popen(popen_forkserver.Popen):
    def __init__(self, process: Process, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait
        super().__init__(process)

    def _launch(self, process: Process) -> None:
        content = io.BytesIO()
        # What `multiprocessing` tells a new process, but for the program's main module.
        prepared = {"sys_path": sys.path, "authkey": process.authkey, "log_to_stderr": False}
        set_spawning_popen(self)
        try:
            reduction.dump(prepared, content)
            reduction.dump(process, content)
        finally:
            set_spawning_popen(None)
        self.sentinel, write_end = process._server.connect_to_new_process(
            self._fds  # type: ignore[attr-defined]
        )
        parent = os.dup(write_end)
        close_fds = util.close_fds  # type: ignore[attr-defined]
        self.finalizer = util.Finalize(self, close_fds, (parent, self.sentinel))
        with open(write_end, "wb") as file:
            file.write(content.getbuffer())
        while not connection.wait([self.sentinel], _LOOK_S):
            self._on_wait()
        self.pid = forkserver.read_signed(self.sentinel)
