"""`shmload run`: hands a program to a template, or runs it in the ordinary way.

Where a template cannot run the program as Python would, this process becomes an ordinary Python
that runs it. No step before that changes anything that the program could see.
"""

import os
import sys
from stat import S_ISREG

from shmload._templates import identity, messages, place, variables, wire
from shmload._templates.messages import Call, Go, Hello, Program, Ready, Refused
from shmload._templates.start import start_template

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

# The template answers at once, or is stopped or overloaded; Python starts in about this time.
_ANSWER_TIMEOUT_S = 1.0


class Doubt(Exception):
    """A template might not run this program as Python would; str says why.

    Args:
        reason: why; empty if there is no template.
        is_replaceable: one that the caller starts could.
    """

    def __init__(self, reason: str, *, is_replaceable: bool = False) -> None:
        super().__init__(reason)
        self.is_replaceable = is_replaceable


def run(program: Program, name: str, is_verbose: bool) -> "NoReturn":
    """Run a program in a copy of a template, or else in the ordinary way.

    Args:
        program: what to run.
        name: of the template.
        is_verbose: say on standard error if it is run in the ordinary way, and why.
    """
    try:
        _hand_over(program, name, is_verbose)
    except Doubt as exc:
        reason = str(exc)
        if exc.is_replaceable:
            given = variables.first_environment()
            started = start_for_the_next(name, given, variables.read_settings(program))
            reason = reason or started
    except OSError as exc:  # no descriptors, no /proc
        reason = str(exc)
    if is_verbose:
        print(f"shmload run: in the ordinary way: {reason}", file=sys.stderr)
    run_plainly(program)


def start_for_the_next(
    name: str,
    environment: "Mapping[str, str]",
    settings: list[list[str]],
    modules: "Sequence[str]" = (),
) -> str:
    """Start a template for later runs of a program; return why there was none for this one.

    Args:
        name: of the template.
        environment: the variables that the program begins with.
        settings: those that it is going to set.
        modules: see `start_template`.
    """
    try:
        given = variables.with_settings(environment, settings)
        key = identity.key_of(name, given)
        if found := place.read_failure(key):
            return found
        if place.is_taken(key):
            return "the template is not ready yet"
        if os.getpid() == 1:  # it would become the child of the program
            return "there is no template, and process 1 starts none"
        start_template(name, modules, given)
    except (OSError, place.PlaceUnsafe) as exc:
        return f"a template cannot be started: {exc}"
    return "there is no template yet"


def _hand_over(program: Program, name: str, is_verbose: bool) -> None:
    """Run the program in a copy of a template; return only by an exception.

    Raises:
        Doubt: a template might not run it as Python would.
        OSError: this process has no descriptor left.
    """
    descriptors = _inherited_descriptors()
    status = identity.read_status()
    _require_ordinary(descriptors, program, status)
    environ = variables.first_environ()
    settings = variables.read_settings(program)
    given = variables.with_settings(variables.variables_in(environ), settings)
    channel = _connect(identity.key_of(name, given))
    _, terminal = identity.session_and_terminal()
    group = os.getpgrp() if terminal else 0
    signals = int(status["SigBlk"], 16), int(status["SigIgn"], 16)
    umask = int(status["Umask"], 8)
    call = Call(
        program, name, settings, environ, descriptors, group, *signals, umask, int(is_verbose)
    )
    from shmload._templates.stand_in import FORWARDED, StandIn, signal

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        ready = _ask(channel, call)
        stand_in = StandIn(ready.pid, channel)
        if group:  # signals to the group that it leaves reach the program only
            os.setpgid(0, ready.group)
        channel.settimeout(None)
        messages.send(channel, Go())
    except (Doubt, OSError):
        if group:
            os.setpgid(0, group)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        channel.close()
        raise
    stand_in.wait()


def _require_ordinary(descriptors: list[int], program: Program, status: dict[str, str]) -> None:
    """Check that nothing here is such that a copy of a template cannot have it.

    Raises:
        Doubt: something is.
    """
    session, terminal = identity.session_and_terminal()
    if program.kind == "stdin":
        raise Doubt("it is read from standard input")
    if program.kind == "script" and not _is_file(program.value):
        raise Doubt("it is not a file")
    if status.get("TracerPid", "0") != "0" or sys.gettrace() or sys.getprofile():
        raise Doubt("this process is traced")
    if sys.flags.interactive or sys.flags.inspect:
        raise Doubt("it is interactive")
    if not {0, 1, 2} <= set(descriptors):
        raise Doubt("a standard stream is closed")
    if terminal and session == os.getpid():
        raise Doubt("this process leads the session of its terminal")
    if len(descriptors) + 1 > wire.MAX_FDS:
        raise Doubt("it inherits very many descriptors")


def _connect(key: str) -> "wire.Socket":
    """Connect to a template.

    Raises:
        Doubt: the place of templates is not this user's alone, or the template is too busy, or
            there is none of this key.
    """
    try:
        channel = wire.connect(place.socket_of(key), _ANSWER_TIMEOUT_S)
    except place.PlaceUnsafe as exc:
        raise Doubt(str(exc)) from exc
    except TimeoutError as exc:
        raise Doubt("the template does not answer") from exc
    except OSError as exc:
        raise Doubt("", is_replaceable=True) from exc
    if wire.peer_of(channel)[1] != os.geteuid():
        channel.close()
        raise Doubt("the template is another user's")
    return channel


def _ask(channel: "wire.Socket", call: Call) -> Ready:
    """Send a call with its descriptors; return the answer of a program that is ready.

    Raises:
        Doubt: the template refuses, or does not answer in time.
    """
    directory = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        answer = messages.receive(channel, Hello, Refused)
        if answer is not None and isinstance(answer[0], Hello):
            messages.send(channel, call, (directory, *call.fds))
            answer = messages.receive(channel, Ready, Refused)
    except (OSError, ValueError) as exc:
        raise Doubt(f"the template does not answer: {exc}") from exc
    finally:
        os.close(directory)
    match answer:
        case [Ready() as ready, _]:
            return ready
        case [Refused() as refused, _]:
            raise Doubt(refused.reason, is_replaceable=bool(refused.is_replaceable))
    raise Doubt("the template has ended")


def _is_file(path: bytes) -> bool:
    """Tell whether a script can be read more than once, and is no folder of a program."""
    try:
        return S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _inherited_descriptors() -> list[int]:
    """Return the descriptors that a program started now would have."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # the one that listed them
            continue
    return sorted(found)


# In the ordinary way ----------------------------------------------------------------------------


def run_plainly(program: Program, environment: "Mapping[str, str] | None" = None) -> "NoReturn":
    """Replace this process by an ordinary Python that runs the program.

    Args:
        program: what it runs.
        environment: its variables, but those of `--redirect`; None for those with which this
            process was started.
    """
    option = {"module": [b"-m"], "code": [b"-c"]}.get(program.kind, [])
    words = [*program.flags, *option, program.value, *program.arguments]
    given = variables.with_redirect(program.redirect, environment or variables.first_environment())
    os.execve(sys.executable, [os.fsencode(sys.executable), *words], given)
