"""Starting a template: a process that outlives its caller, with nothing of the caller's."""

import dis
import importlib.util
import json
import marshal
import os
import sys

from shmload._templates import place, plain
from shmload._templates.kind import first_environment

MODULES = ("torch", "diffusers", "transformers", "shmload.integrations.diffusers")
"""What a template imports."""

# The program of a template. It is the lowest frame of every program, which must not see it.
_SOURCE = """
known = frozenset(__import__("sys").modules)
recorder = {"__name__": "shmload._templates.recorder"}
exec(open(__import__("sys").argv[1]).read(), recorder)
recorder = recorder["Recorder"]()
recorder.start()
serve = __import__("shmload._templates.template", None, None, ("serve",)).serve
leave = __import__("shmload._templates.program", None, None, ("leave",)).leave
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


def start_template(name: str, key: str, modules: tuple[str, ...] = MODULES) -> None:
    """Start a template that goes on when this process ends; do not wait for it.

    Raises:
        OSError: it cannot be started.
    """
    path = f"{place.folder()}/template-{sys.implementation.cache_tag}.pyc"
    content = invisible_program()
    with open(f"{path}.{os.getpid()}", "wb") as file:
        file.write(content)
    os.replace(f"{path}.{os.getpid()}", path)
    flags = plain.flags_of_this_process()
    recorder = os.path.join(os.path.dirname(__file__), "recorder.py")
    orders = json.dumps({"modules": [name, *modules], "key": key})
    environment = first_environment()
    place.forget_failure(key)
    pid = os.fork()
    if pid == 0:
        try:
            _leave_caller()
            if os.fork() == 0:
                os.execve(
                    sys.executable, [sys.executable, *flags, path, recorder, orders], environment
                )
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _leave_caller() -> None:
    """Give up the caller's group, streams, descriptors and directory."""
    from shmload._templates.kind import session_and_terminal

    if session_and_terminal()[1]:
        os.setpgid(0, 0)  # in its session, so that programs can join groups there
    else:
        os.setsid()
    os.chdir("/")
    os.umask(0o077)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd, inheritable=True)
    os.closerange(3, 1 << 20)
