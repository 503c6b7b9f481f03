"""Starting a template: a process that outlives its caller, with nothing of the caller's."""

import os
import sys

from shmload._templates import place, wire
from shmload._templates.identity import flags_of_this_process, key_of, session_and_terminal
from shmload._templates.variables import first_environment, read_on_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MODULES = (
    "torch",
    "diffusers",
    "transformers",
    "shmload.integrations.diffusers",
    "shmload._building.stored",
    "shmload.integrations.redirect",
    "shmload._redirecting.calls",
)
"""The libraries: what a template imports."""
_NAMED = "SHMLOAD_RUN_IMPORTS"

# The program of a template, whose frame is the lowest of every program: it raises again without a
# place of its own in the traceback.
_PROGRAM = """
import sys
known = frozenset(sys.modules)
if not sys.flags.safe_path:
    sys.path[0] = sys.prefix
from shmload._templates.template import serve
from shmload._templates.ending import leave
try:
    serve(known)()
except BaseException:
    leave()
    raise
leave()
"""


def start_template(
    name: str, modules: "Sequence[str]" = (), variables: "dict[str, str] | None" = None
) -> int:
    """Start a template that goes on when this process ends; do not wait for it.

    Args:
        name: of the template.
        modules: what it imports; none for `MODULES`. It also imports what a variable names.
        variables: those that a program has once it has set its own; None for this process's first
            ones. The template gets those that imports read.

    Returns:
        Its process id.

    Raises:
        OSError: it cannot be started.
        PlaceUnsafe: see `place`.
    """
    given = variables or first_environment()
    key = key_of(name, given)
    named = os.environ.get(_NAMED, "").replace(",", " ").split()
    wanted = dict.fromkeys((*(modules or MODULES), *named))
    said = [place.socket_of(key), name, *wanted]
    command = [sys.executable, *flags_of_this_process(), "-c", _PROGRAM, *said]
    # It serves other programs too: they are to know nothing of this process.
    environment = read_on_import(given) | {n: given[n] for n in ("PATH",) if n in given}
    place.remove_note(key, "failed")
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            _leave_caller(writing)
            started = os.fork()
            if started == 0:
                os.execve(sys.executable, command, environment)
            os.write(writing, b"%d" % started)
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with open(reading, "rb") as file:
        answer = file.read()
    if not answer:
        raise BlockingIOError(0, "no process or no memory is left for it")
    return int(answer)


def _leave_caller(kept: int) -> None:
    """Give up the caller's group, streams, descriptors and directory; keep one descriptor."""
    if session_and_terminal()[1]:
        os.setpgid(0, 0)  # in its session, so that programs can join groups there
    else:
        os.setsid()
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd, inheritable=True)
    wire.close_others([kept], first=3)
