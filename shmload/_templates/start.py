"""Starting a template: a process that outlives its caller, with nothing of the caller's."""

import dis
import importlib.util
import json
import marshal
import os
import sys

from shmload._templates import place
from shmload._templates.caller import flags_of_this_process
from shmload._templates.inherited import is_subreaper, renew_session_keyring
from shmload._templates.variables import first_environment, read_on_import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

MODULES = (
    "torch",
    "diffusers",
    "transformers",
    "shmload.integrations.diffusers",
    "shmload._building.preparing",
    "shmload.integrations.redirect",
    "shmload._redirecting.calls",
)
"""The libraries: what a template imports."""
_NAMED = "SHMLOAD_RUN_IMPORTS"

# The program of a template. It is the lowest frame of every program, which must not see it.
_SOURCE = """
known = frozenset(__import__("sys").modules)
recorder = {"__name__": "shmload._templates.recorder"}
exec(open(__import__("sys").argv[1]).read(), recorder)
recorder = recorder["Recorder"]()
recorder.start()
serve = __import__("shmload._templates.template", None, None, ("serve",)).serve
leave = __import__("shmload._templates.leaving", None, None, ("leave",)).leave
try:
    serve(known, recorder)()
except:
    leave()
    raise
leave()
"""


def invisible_program() -> bytes:
    """Return a compiled file whose frame Python shows nowhere.

    A frame is not shown before its code has come to the instruction RESUME (CPython takes it for
    unfinished): not in tracebacks, not by `sys._getframe`, not by `inspect`. Here RESUME comes at
    the end, where it is never reached.
    """
    code = compile(_SOURCE, "<template>", "exec", dont_inherit=True)
    raw = bytearray(code.co_code)
    place_ = next(at for at in range(0, len(raw), 2) if raw[at] == dis.opmap["RESUME"])
    raw[place_ : place_ + 2] = bytes((dis.opmap["NOP"], 0))
    raw += bytes((dis.opmap["RESUME"], 0))
    code = code.replace(co_code=bytes(raw))
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


def why_not_here() -> str | None:
    """Return why this process is not to start a template; None if it may.

    The template would become its child when the process in between ends, and be seen by the
    program that this process becomes.
    """
    if os.getpid() == 1:
        return "there is no template, and process 1 starts none"
    return "there is no template, and a subreaper starts none" if is_subreaper() else None


def start_template(
    name: str, key: str, modules: "Sequence[str]" = (), variables: "dict[str, str] | None" = None
) -> int:
    """Start a template that goes on when this process ends; do not wait for it.

    Args:
        name: of the template.
        key: see `kind`.
        modules: what it imports; none for what the last one of this key did, or else `MODULES`. It
            also imports what a variable names.
        variables: those that a program has once it has set its own; None for this process's first
            ones. The template gets those that imports read.

    Returns:
        Its process id.

    Raises:
        OSError: it cannot be started.
    """
    path = f"{place.folder()}/template-{sys.implementation.cache_tag}.pyc"
    content = invisible_program()
    with open(f"{path}.{os.getpid()}", "wb") as file:
        file.write(content)
    os.replace(f"{path}.{os.getpid()}", path)
    recorder = os.path.join(os.path.dirname(__file__), "recorder.py")
    last = (place.read_note(key, "imports") or "").split()
    named = os.environ.get(_NAMED, "").replace(",", " ").split()
    wanted = dict.fromkeys((*(modules or last or MODULES), *named))
    orders = json.dumps({"modules": [name, *wanted], "key": key})
    flags = flags_of_this_process()
    command = [sys.executable, *flags, path, recorder, orders]
    given = variables or first_environment()
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
    """Give up the caller's group, streams, descriptors, directory and keys; keep one descriptor."""
    from shmload._templates.kind import session_and_terminal

    if session_and_terminal()[1]:
        os.setpgid(0, 0)  # in its session, so that programs can join groups there
    else:
        os.setsid()
    renew_session_keyring()
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd, inheritable=True)
    os.closerange(3, kept)
    os.closerange(kept + 1, 1 << 20)
