"""`shmload run`: hands a program to a template, or runs it in the ordinary way.

Where a template cannot run the program as Python would, this process becomes an ordinary Python
that runs it. No step before that changes anything that the program could see.
"""

import os
import sys

from shmload._templates import identity, messages, place, variables
from shmload._templates.messages import Call, Program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

    from shmload._templates.stand_in import StandIn

# The template answers at once, or is stopped or overloaded; Python starts in about this time.
_ANSWER_TIMEOUT_S = 1.0
_SIGCHLD = 17  # the module signal takes long to import
# The program of a template, whose frame is the lowest of every program: it raises again without a
# place of its own in the traceback. It is no child of the caller: that may become a program, which
# would find a child that it has not started.
_PROGRAM = """
import posix, sys
known = frozenset(sys.modules)
posix.closerange(3, 1 << 20)
if posix.fork():
    posix._exit(0)
if not sys.flags.safe_path:
    sys.path[0] = sys.prefix
from shmload._templates.template import serve
run, leave = serve(known)
try:
    run()
except BaseException:
    leave()
    raise
leave()
"""


class Doubt(Exception):
    """A template might not run this program as Python would; str says why.

    Args:
        reason: why; empty if there is no template.
        is_replaceable: start one if there is none.
    """

    def __init__(self, reason: str, *, is_replaceable: bool = False) -> None:
        super().__init__(reason)
        self.is_replaceable = is_replaceable


def run(program: Program, environment: dict[str, str], is_verbose: bool) -> "NoReturn":
    """Run a program in a copy of a template, or else in the ordinary way.

    Args:
        program: what to run.
        environment: its variables.
        is_verbose: say on standard error if it is run in the ordinary way, and why.
    """
    try:
        stand_in = _hand_over(program, environment, is_verbose)
    except (Doubt, OSError) as exc:  # no descriptors, no /proc
        reason = str(exc)
        if isinstance(exc, Doubt) and exc.is_replaceable:
            started = start_for_the_next(environment, variables.read_settings(program))
            reason = reason or started
    else:
        stand_in.wait()  # nothing from here on runs the program a second time
    if is_verbose:
        print(f"shmload run: in the ordinary way: {reason}", file=sys.stderr)
    run_plainly(words_of(program), environment)


def start_for_the_next(environment: "Mapping[str, str]", settings: list[list[str]]) -> str:
    """Start a template for later runs of a program; return why there was none for this one.

    Args:
        environment: the variables that the program begins with.
        settings: those that it is going to set.
    """
    try:
        given = variables.with_settings(environment, settings)
        key = identity.key_of(given)
        if found := place.read_failure(key):
            return found
        if place.is_taken(key):
            return "the template is not ready yet"
        if os.getpid() == 1:  # it would become the child of the program
            return "there is no template, and process 1 starts none"
        if place.is_full():
            return "there are very many templates (`shmload template stop` ends them)"
        start_template(given)
    except OSError as exc:
        return f"a template cannot be started: {exc}"
    return "there is no template yet"


def _hand_over(program: Program, environment: dict[str, str], is_verbose: bool) -> "StandIn":
    """Run the program in a copy of a template; return what stands for it here.

    Raises:
        Doubt: a template might not run it as Python would.
        OSError: this process has no descriptor left, or the place of templates is unsafe.
    """
    descriptors = _inherited_descriptors()
    status = identity.read_status()
    session, terminal = identity.session_and_terminal()
    _require_ordinary(program, environment, descriptors, status)
    if terminal and session == os.getpid():
        raise Doubt("this process leads the session of its terminal")
    settings = variables.read_settings(program)
    channel = _connect(identity.key_of(variables.with_settings(environment, settings)))
    group = os.getpgrp() if terminal else 0
    signals = int(status["SigBlk"], 16), int(status["SigIgn"], 16)
    umask = int(status["Umask"], 8)
    call = Call(program, settings, environment, descriptors, group, *signals, umask, is_verbose)
    from shmload._templates.stand_in import FORWARDED, StandIn, signal

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        pid, joined = _ask(channel, call)
        stand_in = StandIn(pid, channel)
        if group:  # signals to the group that it leaves reach the program only
            os.setpgid(0, joined)
        channel.settimeout(None)
        messages.send(channel, messages.GO)
    except (Doubt, OSError):
        if group:
            os.setpgid(0, group)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        channel.close()
        raise
    return stand_in


def _require_ordinary(
    program: Program, environment: dict[str, str], descriptors: list[int], status: dict[str, str]
) -> None:
    """Check that nothing here is such that a copy of a template cannot have it.

    Raises:
        Doubt: something is.
    """
    if program.kind == "stdin":
        raise Doubt("it is read from standard input")
    if program.kind == "script" and not os.path.isfile(program.value):
        raise Doubt("it is not a file")
    if status.get("TracerPid", "0") != "0" or sys.gettrace() or sys.getprofile():
        raise Doubt("this process is traced")
    if sys.flags.interactive or sys.flags.inspect:
        raise Doubt("it is interactive")
    if "JPY_PARENT_PID" in environment:  # a kernel of Jupyter ends when its parent does
        raise Doubt("it watches the process that has started it")
    if not {0, 1, 2} <= set(descriptors):
        raise Doubt("a standard stream is closed")
    if len(descriptors) + 1 > messages.MAX_FDS:
        raise Doubt("it inherits very many descriptors")


def _connect(key: str) -> "messages.Socket":
    """Connect to a template.

    Raises:
        Doubt: the template is too busy, or there is none of this key.
        OSError: the place of templates is not this user's alone.
    """
    path = place.socket_of(key)
    try:
        channel = messages.connect(path, _ANSWER_TIMEOUT_S)
    except TimeoutError as exc:
        raise Doubt("the template does not answer") from exc
    except OSError as exc:
        raise Doubt("", is_replaceable=True) from exc
    if messages.peer_of(channel)[1] != os.geteuid():
        channel.close()
        raise Doubt("the template is another user's")
    return channel


def _ask(channel: "messages.Socket", call: Call) -> tuple[int, int]:
    """Send a call with its descriptors; return process and group of a program that is ready.

    Raises:
        Doubt: the template refuses, or does not answer in time.
    """
    directory = os.open(".", os.O_PATH | os.O_CLOEXEC)
    try:
        answer = messages.receive(channel)
        if answer == messages.HELLO:
            messages.send(channel, call.packed(), (directory, *call.fds))
            answer = messages.receive(channel)
    except OSError as exc:
        raise Doubt(f"the template does not answer: {exc}") from exc
    finally:
        os.close(directory)
    match answer.split(b" ", 2):
        case [b"ready", pid, group]:
            return int(pid), int(group)
        case [b"refused", *why]:
            raise Doubt(b" ".join(why).decode(errors="replace"), is_replaceable=True)
    raise Doubt("the template has ended")


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


def words_of(program: Program) -> list[str]:
    """Return what follows `python` on a command line that runs a program."""
    option = {"module": ["-m"], "code": ["-c"]}.get(program.kind, [])
    return [*identity.FLAGS, *option, program.value, *program.arguments]


def run_plainly(words: list[str], environment: "Mapping[str, str]") -> "NoReturn":
    """Replace this process by an ordinary Python.

    Args:
        words: what follows `python` on its command line.
        environment: its variables.
    """
    os.execve(sys.executable, [sys.executable, *words], environment)


# Starting a template, which outlives its caller with nothing of the caller's ----------------------


def start_template(environment: dict[str, str]) -> None:
    """Start a template that goes on when this process ends; do not wait until it serves.

    Args:
        environment: the variables of its programs. It gets those that imports read.

    Raises:
        OSError: it cannot be started.
    """
    key = identity.key_of(environment)
    command = [
        sys.executable,
        *identity.FLAGS,
        "-c",
        _PROGRAM,
        place.socket_of(key),
    ]
    # It serves other programs too: they are to know nothing of this process.
    path = {name: environment[name] for name in ("PATH",) if name in environment}
    given = variables.read_on_import(environment) | path
    place.remove(key, ".failed")
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)]
    pid = os.posix_spawn(
        sys.executable, command, given, file_actions=null, setsigmask=(), setsigdef=(_SIGCHLD,)
    )
    try:
        status = os.waitpid(pid, 0)[1]
    except ChildProcessError:  # this process ignores SIGCHLD
        status = 0
    if status:
        raise BlockingIOError(0, "no process or no memory is left for it")
