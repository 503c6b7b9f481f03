"""A template: a process that has imported the libraries once, and is copied for each program.

    imports ──▶ serves ──▶ drains ──▶ ends
       └── fails: a note says why

`start` starts it; its program calls `serve`. It imports the libraries, and forks when a caller
connects; the copy reads the call. The template tells the caller of stops and of the end.

Guarantee: it has one thread and has not touched a GPU, or it does not serve. Only this user reaches
it, with rights like its own. It takes no more programs when it was idle for long, when its
terminal's session ends, when it is told to end, or when a package that it has imported changes; it
ends with its last program, so that each caller learns how its program has ended.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Collection
from typing import NamedTuple

from shmload._templates import ending, identity, messages, place
from shmload._templates.hidden import Hidden
from shmload._templates.imports import LOOK_S, Imports, Unfit, wanted_modules
from shmload._templates.program import Birth, become, leave_keyring
from shmload._templates.stand_in import FORWARDED
from shmload._templates.variables import first_environment

_IDLE_S = 1800.0
# With no descriptor left, connections wait until a program has ended: looked at this often.
_PAUSE_S = 0.2
# Another process may hold the lock for a moment, to see whether it is held.
_LOCK_TRIES = 10
# What its terminal sends, and what a program sends to its parent.
_IGNORED = {*FORWARDED} - {signal.SIGCHLD, signal.SIGTERM, signal.SIGALRM}
# Linux 6.5; not in the module socket.
_SO_PEERPIDFD = 77


def serve(known: Collection[str]) -> Birth:
    """Be a template; return only in copies, with what runs their program and sees to its end.

    Args:
        known: names of the modules that there were before anything was imported.
    """
    key = os.path.basename(sys.argv[1])
    _leave_caller()
    own_key = identity.key_of(first_environment())
    del sys.path[: 0 if sys.flags.safe_path else 1]
    for _ in range(_LOCK_TRIES):
        if (lock := place.take_lock(key)) is not None:
            break
        time.sleep(0.01)
    else:
        os._exit(0)  # another one starts at the same time
    pid = os.getpid()
    try:
        if own_key != key:
            raise Unfit("it has other limits, rights or variables than its callers")
        template = Template(key, lock, known)
        template.begin()
        return template.run()
    except BaseException as exc:  # a module may raise anything
        if os.getpid() == pid:
            reason = f"there can be no template: {type(exc).__name__}: {exc}"
            place.write_note(key, "failed", reason)
        os._exit(1)


def _leave_caller() -> None:
    """Give up the caller's group, directory, umask and keys; ignore signals."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    if identity.session_and_terminal()[1]:
        os.setpgid(0, 0)  # in its session, so that programs can join groups there
    else:
        os.setsid()
    os.chdir("/")
    os.umask(0o077)
    said = os.memfd_create("said")  # what imports write
    for fd in (1, 2):
        os.dup2(said, fd)
    os.close(said)
    leave_keyring()


class _Caller(NamedTuple):
    """A caller whose program runs."""

    channel: socket.socket
    pidfd: int

    def tell(self, message: bytes) -> None:
        """Send a message; a caller that has stopped reads nothing, and must not delay others."""
        with contextlib.suppress(OSError):
            messages.send(self.channel, message, waits=False)

    def go_on(self) -> None:
        """Continue it: it has stopped with its program."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGCONT)

    def close(self) -> None:
        self.channel.close()
        os.close(self.pidfd)


class Template:
    """Answers callers, and watches the programs that run.

    Args:
        key: see `identity`.
        lock: holds the right to be the template of this key.
        known: names of the modules that any Python has.
    """

    def __init__(self, key: str, lock: int, known: Collection[str]) -> None:
        self._lock = lock
        self._key = key
        self._rights = identity.rights_of()
        self._hidden = Hidden(known)
        self._imports = Imports(self._hidden)
        self._callers: dict[int, _Caller] = {}
        """By process of a program that runs."""
        self._is_draining = False
        self._used = time.monotonic()
        self._poll = select.poll()

    def begin(self) -> None:
        """Import modules, and open the socket.

        Raises:
            Unfit: there can be no template.
            BaseException: a library has raised it.
        """
        signal.signal(signal.SIGTERM, self._give_up)
        place.write_note(self._key, "failed", "the template has ended while it imported")
        self._imports.make(wanted_modules())
        self._imports.make_kept()
        ending.end_without_destructors()
        self._waking, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        """Becomes readable when a child has changed."""
        self._poll.register(self._waking, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        session, terminal = identity.session_and_terminal()
        self._leader = os.pidfd_open(session) if terminal else -1
        if terminal:
            self._poll.register(self._leader, select.POLLIN)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(place.socket_of(self._key))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._poll.register(self._listener.fileno(), select.POLLIN)
        signal.signal(signal.SIGTERM, self._drain)
        place.remove(self._key, ".failed")

    def run(self) -> Birth:
        """Serve; end this process, or return what runs the program in a copy."""
        while True:
            self._tend()
            for fd, _ in self._poll.poll(1000 * LOOK_S):
                if fd == self._waking:
                    self._reap()
                elif fd == self._leader:
                    self._poll.unregister(fd)
                    self._drain()
                elif not self._is_draining and (birth := self._accept()):
                    return birth

    # Programs -------------------------------------------------------------------------------------

    def _accept(self) -> Birth | None:
        """Take a caller, and fork; return what runs its program in the copy, else None."""
        self._used = time.monotonic()
        try:
            channel, _ = self._listener.accept()
        except OSError:
            time.sleep(_PAUSE_S)
            return None
        try:
            caller = _Caller(channel, _pidfd_of(channel))
        except OSError:  # it has ended
            channel.close()
            return None
        pid = 0
        refused = self._why_not(caller)
        if not refused:
            try:
                pid = os.fork()
            except OSError as exc:  # too many processes, or no memory
                refused = f"the template cannot start a process: {exc}"
        if refused:
            caller.tell(b"refused " + refused.encode())
            caller.close()
            return None
        if pid == 0:
            # Never freed: that would mean to copy the pages of all that it remembers.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
            return become(channel, self._hidden, self._imports.descriptors)
        self._callers[pid] = caller
        return None

    def _why_not(self, caller: _Caller) -> str:
        """Return why a process may not use this template; empty if it may."""
        pid, user = messages.peer_of(caller.channel)
        if user != os.geteuid():
            return "the template is another user's"
        if why := identity.how_it_differs(pid, caller.pidfd, self._rights):
            return f"this process may not use the template: {why}"
        if self._imports.are_stale():
            self._drain()
            return "stale: a package has changed"
        return ""

    def _reap(self) -> None:
        """Learn what has become of children, and tell their callers."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._waking, 1 << 10)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            caller = self._callers.get(pid)
            if caller is None:
                continue
            if os.WIFSTOPPED(status):
                caller.tell(messages.STOPPED)
            elif os.WIFCONTINUED(status):
                caller.go_on()
            else:
                ending.live_without(caller.channel)  # what the program has started goes on
                caller.tell(b"ended %d" % status)
                caller.go_on()  # a program that ends just after it is not told of as continued
                del self._callers[pid]
                caller.close()
                self._used = time.monotonic()

    # The template itself --------------------------------------------------------------------------

    def _tend(self) -> None:
        """Do what time or an event has brought."""
        idle = time.monotonic() - self._used
        if not self._callers and idle > _IDLE_S:
            self._drain()
        if self._is_draining and not self._callers:
            os._exit(0)
        if not self._is_draining:
            try:
                self._imports.make_kept()
            except BaseException:  # the next template says why, if it cannot either
                signal.alarm(0)
                self._drain()

    def _give_up(self, *_: object) -> None:
        """End, told so before this template serves; that is no failure."""
        place.remove(self._key, ".failed")
        os._exit(0)

    def _drain(self, *_: object) -> None:
        """Take no more programs; another template may take the place."""
        if self._is_draining:
            return
        self._is_draining = True
        self._poll.unregister(self._listener.fileno())
        self._listener.close()  # the next template removes its path
        os.close(self._lock)


def _pidfd_of(channel: messages.Socket) -> int:
    """Return a descriptor of the process that connected.

    Raises:
        OSError: it has ended.
    """
    try:
        return channel.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(messages.peer_of(channel)[0])
