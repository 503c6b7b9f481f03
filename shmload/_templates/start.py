"""Starting a template: a process that outlives its caller, with nothing of the caller's."""

import os
import sys

from shmload._templates import place
from shmload._templates.identity import flags_of_this_process, key_of
from shmload._templates.variables import read_on_import

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


def start_template(environment: dict[str, str]) -> None:
    """Start a template that goes on when this process ends; do not wait until it serves.

    Args:
        environment: the variables of its programs. It gets those that imports read.

    Raises:
        OSError: it cannot be started.
    """
    key = key_of(environment)
    command = [sys.executable, *flags_of_this_process(), "-c", _PROGRAM, place.socket_of(key)]
    # It serves other programs too: they are to know nothing of this process.
    given = read_on_import(environment) | {n: environment[n] for n in ("PATH",) if n in environment}
    place.remove_note(key, "failed")
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
