"""A template: a process that has imported the libraries once, and is copied for each program.

`start` starts it; its program calls `serve`. It imports the libraries, with a record of what
that did, and forks a spare. A caller connects and sends its call; the template hands it to the
spare, forks the next one, and tells the caller of stops and of the end.

Guarantee: it has one thread and has not touched a GPU, or it does not serve. Only this user reaches
it. It ends when it was idle for long, when its terminal's session ends, or when a package that it
has imported changes.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any, NoReturn, Self

from shmload._templates import kind, place, wire
from shmload._templates.program import Spare
from shmload._templates.recorder import Recorder
from shmload._templates.stash import Stash

IDLE_S = 1800.0
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN,
            signal.SIGTTOU, signal.SIGPIPE, signal.SIGXFSZ)  # fmt: skip
_CALL_TIMEOUT_S = 5.0
_THREADS_TIMEOUT_S = 5.0
_MAX_LOST_SPARES = 3
# A template starts again, to import more, only when no program has come for this long.
_QUIET_S = 10.0


class Unfit(Exception):
    """This process cannot be a template; str says why."""


def serve(known: Collection[str], recorder: Recorder) -> Callable[[], Any]:
    """Be a template; return only in copies, with what runs their program.

    Args:
        known: names of the modules that were there before anything was imported.
        recorder: records since then.
    """
    orders = json.loads(sys.argv[2])
    name, *modules = orders["modules"]
    key = orders["key"]
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    facts = kind.facts_of_this_process(name)
    del sys.path[: 0 if sys.flags.safe_path else 1]
    recorder.fresh["path"] = list(sys.path)
    lock = os.open(place.socket_of(key) + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os._exit(0)  # another one starts at the same time
    try:
        keep = _import(modules, recorder)
        _require_fitness()
    except BaseException as exc:  # a module may raise anything
        if place.remembered():
            place.forget_modules()
            os._exit(1)  # the next program starts one without them
        place.write_failure(key, f"there can be no template: {type(exc).__name__}: {exc}")
        os._exit(1)
    template = Template(name, key, facts, recorder, known, keep)
    pid = os.getpid()
    try:
        return template.run()
    except BaseException:
        if os.getpid() == pid:
            place.write_failure(key, f"the template failed: {traceback.format_exc()}")
        os._exit(1)


def _import(modules: list[str], recorder: Recorder) -> set[int]:
    """Import modules, with a record; return the descriptors that they have opened."""
    with _Output() as output:
        recorder.drain = output.drain
        opened = _descriptors()
        for module in modules:
            importlib.import_module(module)
        for module in place.remembered():
            with contextlib.suppress(ImportError):  # it may have been removed since
                importlib.import_module(module)
        recorder.stop()
        return _descriptors() - opened


class Template:
    """Answers callers, keeps a spare, and watches the programs that run."""

    def __init__(
        self,
        name: str,
        key: str,
        facts: str,
        recorder: Recorder,
        known: Collection[str],
        keep: set[int],
    ) -> None:
        self._name = name
        self._key = key
        self._facts = facts
        self._recorder = recorder
        self._stash = Stash(recorder, known)
        self._keep = keep
        self._programs: dict[int, socket.socket] = {}
        """The callers' sockets, by the process id of their program."""
        before = kind.first_environment()
        now = {os.fsdecode(name): os.fsdecode(value) for name, value in recorder.fresh["environ"]}
        # Python sets some by itself when it starts: LC_CTYPE in the locale C.
        self._coerced = {name: value for name, value in now.items() if name not in before}
        self._spare = 0
        self._lost_spares = 0
        """Spares that ended before they were used, since one was."""
        self._orders: socket.socket | None = None
        self._used = time.monotonic()
        self._files = _modified_files()
        self._modules = place.remembered()

    def run(self) -> Callable[[], Any]:
        """Serve; return in a copy only."""
        path = place.socket_of(self._key)
        listener = wire.open_socket()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener.bind(path)
        listener.listen(64)
        waking, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        gc.collect()
        gc.freeze()
        run = self._fork()
        if run:
            return run
        session, terminal = kind.session_and_terminal()
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(waking, select.POLLIN)
        leader = -1
        if terminal:
            leader = os.pidfd_open(session)
            poll.register(leader, select.POLLIN)
        while True:
            idle = time.monotonic() - self._used
            if not self._programs and idle > IDLE_S:
                self._end(path)
            if not self._programs and idle > _QUIET_S and place.remembered() != self._modules:
                self._start_again(path)
            for channel in self._programs.values():
                poll.register(channel, select.POLLHUP)
            for fd, _ in poll.poll(_QUIET_S * 1000):
                if fd == waking:
                    with contextlib.suppress(BlockingIOError):
                        os.read(waking, 1 << 10)
                    run = self._reap(poll)
                elif fd == leader:
                    self._end(path)
                elif fd == listener.fileno():
                    run = self._answer(listener, path)
                else:
                    self._lost(fd, poll)
                if run:
                    return run

    def _answer(self, listener: socket.socket, path: str) -> Callable[[], Any] | None:
        channel, _ = listener.accept()
        os.set_inheritable(channel.fileno(), False)
        channel.settimeout(_CALL_TIMEOUT_S)
        self._used = time.monotonic()
        try:
            _, user, _ = wire.peer_of(channel)
            found = wire.receive(channel) if user == os.geteuid() else None
            if found is None:
                channel.close()
                return None
            call = found[0]
            if call["kind"] == "end":
                self._end(path)
            if call["kind"] == "look":
                wire.send(channel, self._look())
                channel.close()
                return None
            refusal = self._refusal(call)
            if refusal:
                wire.send(channel, {"refused": refusal})
                channel.close()
                if refusal.startswith("stale"):
                    self._end(path)
                return None
            assert self._orders
            wire.send(self._orders, call, (channel.fileno(),))
        except (OSError, ValueError, KeyError):
            channel.close()
            return None
        self._programs[self._spare] = channel
        self._lost_spares = 0
        self._orders.close()
        self._orders = None
        return self._fork()

    def _refusal(self, call: dict[str, Any]) -> str | None:
        if call["facts"] != self._facts:
            return "this process differs from the template"
        environment = self._coerced | {
            os.fsdecode(wire.as_bytes(name)): os.fsdecode(wire.as_bytes(value))
            for name, value in call["environ"]
        }
        for name, value in self._recorder.variables.items():
            if environment.get(name) != value:
                return f"{name} is not what the template has read on import"
        if _modified_files() != self._files:
            return "stale: a package has changed"
        return None

    def _look(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "name": self._name,
            "programs": len(self._programs),
            "idle_s": time.monotonic() - self._used,
        }

    def _fork(self) -> Callable[[], Any] | None:
        """Fork the next spare; in it, return what runs its program."""
        ours, theirs = wire.pair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for channel in self._programs.values():
                channel.close()
            return Spare(self._stash, self._recorder.fresh, self._coerced, self._keep).wait(theirs)
        theirs.close()
        self._orders, self._spare = ours, pid
        return None

    def _reap(self, poll: select.poll) -> Callable[[], Any] | None:
        """Tell callers what became of their programs."""
        run = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self._tell(pid, {"stopped": os.WSTOPSIG(status)})
            elif os.WIFCONTINUED(status):
                self._continue(pid)
            else:
                self._tell(pid, {"ended": status})
                channel = self._programs.pop(pid, None)
                if channel:
                    with contextlib.suppress(KeyError):
                        poll.unregister(channel)
                    channel.close()
                if pid == self._spare and self._orders:
                    self._lost_spares += 1
                    if self._lost_spares > _MAX_LOST_SPARES:
                        raise Unfit("its copies end before they are used")
                    self._orders.close()
                    run = self._fork()
        self._used = time.monotonic()
        return run

    def _tell(self, pid: int, message: dict[str, Any]) -> None:
        channel = self._programs.get(pid)
        if channel:
            with contextlib.suppress(OSError):
                wire.send(channel, message)

    def _continue(self, pid: int) -> None:
        """Continue a caller that has stopped with its program."""
        channel = self._programs.get(pid)
        if channel:
            caller, _, _ = wire.peer_of(channel)
            with contextlib.suppress(ProcessLookupError):
                os.kill(caller, signal.SIGCONT)

    def _lost(self, fd: int, poll: select.poll) -> None:
        """End the program of a caller that has gone."""
        for pid, channel in list(self._programs.items()):
            # The number may be that of another caller since.
            if channel.fileno() == fd and _is_gone(channel):
                poll.unregister(fd)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                del self._programs[pid]
                channel.close()

    def _start_again(self, path: str) -> NoReturn:
        """Become a template that has also imported what programs have imported since."""
        os.unlink(path)
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, kind.first_environment())

    def _end(self, path: str) -> NoReturn:
        """End; programs that run go on."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os._exit(0)


def _is_gone(channel: socket.socket) -> bool:
    """Tell whether the other side has closed."""
    poll = select.poll()
    poll.register(channel, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


class _Output:
    """Catches what is written to the standard streams, by Python or by C, in a block."""

    def __enter__(self) -> Self:
        self._saved = {fd: os.dup(fd) for fd in (1, 2)}
        self._files = {fd: os.memfd_create("shmload-output") for fd in (1, 2)}
        self._sizes = dict.fromkeys((1, 2), 0)
        for fd, file in self._files.items():
            os.dup2(file, fd)
        return self

    def drain(self) -> list[tuple[int, bytes]]:
        """Return what came since the last call."""
        found = []
        for fd, stream in ((1, sys.stdout), (2, sys.stderr)):
            stream.flush()
            size = os.fstat(fd).st_size
            if size > self._sizes[fd]:
                found.append((fd, os.pread(fd, size - self._sizes[fd], self._sizes[fd])))
                self._sizes[fd] = size
        return found

    def __exit__(self, *_: object) -> None:
        for fd, file in self._files.items():
            os.dup2(self._saved[fd], fd)
            os.close(self._saved[fd])
            os.close(file)


def _descriptors() -> set[int]:
    return {
        int(name)
        for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}")
    }


def _modified_files() -> dict[str, int]:
    """Return when each file that was imported was last modified, in nanoseconds."""
    found = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file:
            try:
                found[file] = os.stat(file).st_mtime_ns
            except OSError:
                found[file] = 0
    return found


def _require_fitness() -> None:
    """Check that copies of this process are sound.

    Raises:
        Unfit: it has more than one thread, or has touched a GPU.
    """
    pid = os.fork()  # OpenBLAS ends its threads before a fork, and starts them when it needs them
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + _THREADS_TIMEOUT_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            raise Unfit("its imports have left threads running")
        time.sleep(0.001)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise Unfit("its imports have touched the GPU")
