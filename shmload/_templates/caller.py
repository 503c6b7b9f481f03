"""`shmload run`: hands a program to a template, and stands for it with whoever waits for it.

Signals that reach this process go to the program. The program's end, or its stop, becomes the end
or stop of this process. Where a template cannot run the program exactly as Python would, this
process becomes an ordinary Python that runs it.
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import stat
import sys
from typing import Any, NoReturn

from shmload._templates import kind, place, wire
from shmload._templates.plain import flags_of_this_process, run_plainly
from shmload._templates.standing import read_standing

# The template answers at once, or is stopped or overloaded; Python starts in about this time.
_ANSWER_TIMEOUT_S = 1.0
_FORWARDED = sorted(
    signal.valid_signals()
    - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ,
       signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS,
       signal.SIGTRAP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH}
)  # fmt: skip


class Doubt(Exception):
    """A template might not run this program as Python would; str says why."""


class NoTemplate(Exception):
    """No template of this kind runs."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def run(call: dict[str, Any], name: str, is_verbose: bool) -> NoReturn:
    """Run a program in a copy of a template, or else in the ordinary way.

    Args:
        call: the program: `kind`, `value`, `arguments`.
        name: of the template.
        is_verbose: say on standard error how it is run.
    """
    call["flags"] = [wire.as_text(os.fsencode(flag)) for flag in flags_of_this_process()]
    try:
        _hand_over(call, name)
    except Doubt as exc:
        reason = str(exc)
    except NoTemplate as exc:
        reason = place.read_failure(exc.key) or "there is no template yet"
        if not place.read_failure(exc.key):
            from shmload._templates.start import start_template

            with contextlib.suppress(OSError, place.PlaceUnsafe):
                start_template(name, exc.key)
    if is_verbose:
        print(f"shmload run: in the ordinary way: {reason}", file=sys.stderr)
    run_plainly(call)


def _hand_over(call: dict[str, Any], name: str) -> None:
    """Run the program in a copy of a template; return only by an exception.

    Raises:
        Doubt: a template might not run it as Python would.
        NoTemplate: there is none.
    """
    descriptors = _inherited_descriptors()
    _require_ordinary_process(descriptors)
    if call["kind"] == "stdin":
        raise Doubt("it is read from standard input")
    if call["kind"] == "script" and not _is_file(wire.as_bytes(call["value"])):
        raise Doubt("it is not a file or directory")
    facts = kind.facts_of_this_process(name)
    channel = _connect(kind.key_of(facts))
    _, terminal = kind.session_and_terminal()
    call["facts"] = facts
    call["environ"] = [
        (wire.as_text(os.fsencode(name)), wire.as_text(os.fsencode(value)))
        for name, value in kind.first_environment().items()
    ]
    call["fds"] = descriptors
    call["group"] = os.getpgrp() if terminal else 0
    call["standing"] = read_standing()
    waking, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        answer = _ask(channel, call)
        program = Program(answer["ready"], channel, waking)
        if terminal:  # signals to the group that it leaves reach the program only
            os.setpgid(0, answer["group"])
    except (Doubt, OSError) as exc:
        channel.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise Doubt(str(exc)) from exc
    program.stand_for(woken)


def _require_ordinary_process(descriptors: list[int]) -> None:
    """Check that this process has nothing that a copy of a template cannot have.

    Raises:
        Doubt: it has.
    """
    status = kind.read_status()
    session, terminal = kind.session_and_terminal()
    if status.get("TracerPid", "0") != "0" or sys.gettrace() or sys.getprofile():
        raise Doubt("this process is traced")
    if sys.flags.interactive or sys.flags.inspect:
        raise Doubt("it is interactive")
    if not {0, 1, 2} <= set(descriptors):
        raise Doubt("a standard stream is closed")
    if terminal and session == os.getpid():
        raise Doubt("this process leads the session of its terminal")
    if len(descriptors) + 1 > wire.MAX_FDS - 2:
        raise Doubt("it inherits very many descriptors")


def _connect(key: str) -> socket.socket:
    """Connect to a template.

    Raises:
        Doubt: the place of templates is not this user's alone.
        NoTemplate: there is none of this key.
    """
    channel = wire.open_socket()
    channel.settimeout(_ANSWER_TIMEOUT_S)
    try:
        channel.connect(place.socket_of(key))
    except place.PlaceUnsafe as exc:
        raise Doubt(str(exc)) from exc
    except OSError as exc:
        raise NoTemplate(key) from exc
    if wire.peer_of(channel)[1] != os.geteuid():
        raise Doubt("the template is another user's")
    return channel


def _ask(channel: socket.socket, call: dict[str, Any]) -> dict[str, Any]:
    """Send a call and then the descriptors; return the answer of a program that is ready.

    Raises:
        Doubt: the template refuses, or does not answer in time.
    """
    directory = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        wire.send(channel, call)
        answer = wire.receive(channel)
        # Only now: a stopped template would keep descriptors that wait for it open.
        if answer is not None and "send" in answer[0]:
            wire.send(channel, {}, (directory, *call["fds"]))
            answer = wire.receive(channel)
    except (OSError, ValueError) as exc:
        raise Doubt(f"the template does not answer: {exc}") from exc
    finally:
        os.close(directory)
    if answer is None:
        raise Doubt("the template has ended")
    if "ready" not in answer[0]:
        raise Doubt(answer[0].get("refused", "the template's answer is not known"))
    return answer[0]


class Program:
    """A program that runs in a copy of a template.

    Args:
        pid: its process.
        channel: to the template and to the program.
        waking: becomes readable when a signal has come.
    """

    def __init__(self, pid: int, channel: socket.socket, waking: int) -> None:
        self._pid = pid
        self._fd = os.pidfd_open(pid)
        template, _, _ = wire.peer_of(channel)
        self._template = os.pidfd_open(template)
        self._channel = channel
        self._waking = waking
        self._code: int | None = None

    def stand_for(self, woken: int) -> NoReturn:
        """Let it run, pass signals on, and end as it ends.

        Args:
            woken: the other end of `waking`.
        """
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        kept = {self._fd, self._template, self._channel.fileno(), self._waking, woken, null}
        for fd in range(3):
            os.dup2(null, fd)
        for low, high in zip([2, *sorted(kept)], [*sorted(kept), 1 << 20], strict=True):
            os.closerange(low + 1, high)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for number in map(int, _FORWARDED):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTTIN, signal.SIG_IGN)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        self._channel.settimeout(None)
        with contextlib.suppress(OSError):
            wire.send(self._channel, {"go": 1})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        self._wait()

    def _wait(self) -> NoReturn:
        """Pass signals on, and end with the program."""
        poll = select.poll()
        for fd in (self._channel.fileno(), self._waking, self._template):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._waking:
                    with contextlib.suppress(BlockingIOError):
                        for number in os.read(self._waking, 1 << 10):
                            self._signal(number)
                elif fd == self._template:
                    # It was killed. From now on only the program's end is to be seen.
                    for gone in (self._template, self._channel.fileno()):
                        poll.unregister(gone)
                    poll.register(self._fd, select.POLLIN)
                elif fd == self._fd:
                    self._end_without_template()
                else:
                    self._listen()

    def _signal(self, number: int) -> None:
        if number == signal.SIGCONT and not self._is_stopped():
            return  # this process was to continue, with its program
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, number)

    def _is_stopped(self) -> bool:
        try:
            with open(f"/proc/{self._pid}/stat", encoding="latin-1") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def _listen(self) -> None:
        found = wire.receive(self._channel)
        if found is None:
            select.select([self._fd], [], [])
            self._end_without_template()
        match found[0]:
            case {"code": int(code)}:
                self._code = code
            case {"stopped": _}:
                os.kill(os.getpid(), signal.SIGSTOP)  # the template continues it
            case {"ended": int(status)}:
                end_as(status)

    def _end_without_template(self) -> NoReturn:
        """End as the program has ended, as far as that is known without its template."""
        self._channel.setblocking(False)
        with contextlib.suppress(OSError, ValueError):
            while (found := wire.receive(self._channel)) is not None:
                self._code = found[0].get("code", self._code)
                if "ended" in found[0]:
                    end_as(found[0]["ended"])
        os._exit(255 if self._code is None else self._code)


def end_as(status: int) -> NoReturn:
    """End this process as another one has ended, by its status from `os.waitpid`."""
    if os.WIFSIGNALED(status):
        import resource

        number: int = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _is_file(path: bytes) -> bool:
    """Tell whether a script can be read more than once."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _inherited_descriptors() -> list[int]:
    """Return the descriptors that a program started now would have."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed them
            if not fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                found.append(int(name))
    return sorted(found)
