"""`shmload run`: hands a program to a template, or runs it in the ordinary way.

Where a template cannot run the program exactly as Python would, this process becomes an ordinary
Python that runs it. No step before that changes anything that the program could see.
"""

import contextlib
import os
import sys
from stat import S_ISDIR, S_ISREG

from shmload._templates import kind, messages, place, variables, wire
from shmload._templates.messages import Call, Fds, Go, Program, Ready, Refused, SendFds

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

# The template answers at once, or is stopped or overloaded; Python starts in about this time.
_ANSWER_TIMEOUT_S = 1.0

SHMLOAD = """\
import sys
if not sys.flags.safe_path:
    sys.path[0] = sys.prefix
from shmload.__main__ import run
run()
"""
"""The code of the program `shmload`. Unlike `-m` it imports nothing from the current directory."""


class Doubt(Exception):
    """A template might not run this program as Python would; str says why.

    Args:
        reason: why; empty if there is no template.
        is_replaceable: one that the caller starts could.
    """

    def __init__(self, reason: str, *, is_replaceable: bool = False) -> None:
        super().__init__(reason)
        self.is_replaceable = is_replaceable


class _Wanted:
    """The template that a program needs.

    Args:
        program: what is to run.
        name: of the template.
    """

    def __init__(self, program: Program, name: str) -> None:
        self.name = name
        self.settings = variables.read_settings(program)
        self.variables = variables.with_settings(variables.first_environment(), self.settings)
        self.key = kind.key_of_this_process(name, self.variables)


def run(program: Program, name: str, is_verbose: bool) -> "NoReturn":
    """Run a program in a copy of a template, or else in the ordinary way.

    Args:
        program: what to run.
        name: of the template.
        is_verbose: say on standard error if it is run in the ordinary way, and why.
    """
    try:
        wanted = _Wanted(program, name)
        _hand_over(program, wanted, is_verbose)
    except Doubt as exc:
        reason = str(exc)
        if exc.is_replaceable:
            _end_template(wanted.key)
            started = _start_for_the_next(wanted)
            reason = reason or started
    except OSError as exc:  # no descriptors, no /proc
        reason = str(exc)
    if is_verbose:
        print(f"shmload run: in the ordinary way: {reason}", file=sys.stderr)
    run_plainly(program)


def _start_for_the_next(wanted: _Wanted, modules: "Sequence[str]" = ()) -> str:
    """Start a template for later programs; return why there was none for this one.

    Args:
        wanted: the template.
        modules: see `start_template`.
    """
    try:
        found = place.read_failure(wanted.key)
        if found:
            return found
        if place.is_taken(wanted.key):
            return "the template is not ready yet"
        from shmload._templates.start import start_template, why_not_here

        found = why_not_here()
        if not found:
            start_template(wanted.name, wanted.key, modules, wanted.variables)
        return found or "there is no template yet"
    except (OSError, place.PlaceUnsafe) as exc:
        return f"a template cannot be started: {exc}"


def _hand_over(program: Program, wanted: _Wanted, is_verbose: bool) -> None:
    """Run the program in a copy of a template; return only by an exception.

    Raises:
        Doubt: a template might not run it as Python would.
        OSError: this process has no descriptor left.
    """
    descriptors = _inherited_descriptors()
    _require_ordinary(descriptors, program)
    _, terminal = kind.session_and_terminal()
    group = os.getpgrp() if terminal else 0
    call = Call(
        program=program,
        settings=wanted.settings,
        fds=descriptors,
        group=group,
        standing=kind.own_standing(),
        is_verbose=int(is_verbose),
    )
    channel = _connect(wanted.key)
    from shmload._templates.stand_in import FORWARDED, StandIn, Witness, signal

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    witness = None
    try:
        answer = _ask(channel, call)
        witness = None if group else Witness()
        stand_in = StandIn(answer, channel, witness)
        if group:  # signals to the group that it leaves reach the program only
            os.setpgid(0, answer.group)
        channel.settimeout(None)
        messages.send(channel, Go())
    except (Doubt, OSError):
        if group:
            os.setpgid(0, group)
        if witness:
            witness.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        channel.close()
        raise

    def note(found: list[list[str]]) -> None:
        """Note what the program has set, and start a template that has it."""
        try:
            variables.write_settings(program, found)
            modules = (place.read_note(wanted.key, "imports") or "").split()
            _start_for_the_next(_Wanted(program, wanted.name), modules)
        except (OSError, place.PlaceUnsafe):
            return  # the next run starts over, too

    stand_in.wait(note)


def _end_template(key: str) -> None:
    """Have a template that cannot serve this process take no more programs."""
    with contextlib.suppress(OSError, ValueError, place.PlaceUnsafe):  # it has ended
        path = place.socket_of(key)
        with contextlib.closing(wire.connect(path, _ANSWER_TIMEOUT_S)) as channel:
            messages.send(channel, messages.End())
            messages.receive(channel)


def _require_ordinary(descriptors: list[int], program: Program) -> None:
    """Check that nothing here is such that a copy of a template cannot have it.

    Raises:
        Doubt: something is.
    """
    status = kind.read_status()
    session, terminal = kind.session_and_terminal()
    if program.kind == "stdin":
        raise Doubt("it is read from standard input")
    if program.kind == "script" and not _is_file(program.value):
        raise Doubt("it is not a file or directory")
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
    """Send a call and then the descriptors; return the answer of a program that is ready.

    Raises:
        Doubt: the template refuses, or does not answer in time.
    """
    directory = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        messages.send(channel, call)
        answer = messages.receive(channel, SendFds, Refused)
        # Only now: a stopped template would keep descriptors that wait for it open.
        if answer is not None and isinstance(answer[0], SendFds):
            with open("/proc/self/environ", "rb", buffering=0) as file:
                environ = file.read()
            messages.send(channel, Fds(environ), (directory, *call.fds))
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
    """Tell whether a script can be read more than once."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return S_ISREG(mode) or S_ISDIR(mode)


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


def command_of(program: "Program") -> list[bytes]:
    """Return the command that runs a program."""
    option = {"module": [b"-m"], "code": [b"-c"]}.get(program.kind, [])
    rest = [*option, program.value, *program.arguments]
    return [os.fsencode(sys.executable), *program.flags, *rest]


def run_plainly(program: "Program", environment: "Mapping[str, str] | None" = None) -> "NoReturn":
    """Replace this process by an ordinary Python that runs the program.

    Args:
        program: what it runs.
        environment: its variables, but those of `--redirect`; None for those with which this
            process was started.
    """
    given = variables.with_redirect(program.redirect, environment or variables.first_environment())
    os.execve(sys.executable, command_of(program), given)
