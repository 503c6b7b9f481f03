"""Templates as another process sees them: which there are, how one is started and ended."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass

from shmload._host.procfs import rollup_nbytes
from shmload._templates import place
from shmload._templates.caller import start_template
from shmload._templates.identity import is_stopped, key_of, said_of
from shmload._templates.variables import first_environment
from shmload._wording import count_of, format_nbytes

_START_TIMEOUT_S = 120.0
# The socket appears when a template is ready; nothing tells of that.
_LOOK_AGAIN_S = 0.02


class NotStarted(Exception):
    """A template cannot be started; str says why."""


@dataclass(frozen=True, slots=True)
class ListedTemplate:
    """A template that takes programs, or will.

    Fields:
        pid: its process id.
        state: `starting`, `ready`, or `stopped` by a signal.
        programs: how many run.
        memory_nbytes: its share of memory (PSS), in bytes.
        socket: the path of its socket.
    """

    pid: int
    state: str
    programs: int
    memory_nbytes: int
    socket: str

    def __str__(self) -> str:
        programs, memory = count_of(self.programs, "program"), format_nbytes(self.memory_nbytes)
        remedy = f" (`kill -CONT {self.pid}`)" if self.state == "stopped" else ""
        return f"process {self.pid}, {self.state}{remedy}, {programs}, {memory}"


def templates() -> list[ListedTemplate]:
    """Return the templates of this user.

    Raises:
        OSError: their directory is not this user's alone.
    """
    found = []
    for name in sorted(os.listdir(place.folder())):
        key, _, end = name.partition(".")
        path = place.socket_of(key)
        # It is read while it is written, or the process has ended since.
        with contextlib.suppress(OSError, ValueError):
            if end == "lock" and place.is_taken(key):
                with open(f"{path}.lock", encoding="ascii") as file:
                    pid = int(file.read())
                state = "ready" if os.path.exists(path) else "starting"
                state = "stopped" if is_stopped(pid) else state
                children = said_of(pid, f"task/{pid}/children") or ""
                memory = rollup_nbytes(pid, "Pss:")
                found.append(ListedTemplate(pid, state, len(children.split()), memory, path))
    return found


def end(template: ListedTemplate) -> None:
    """Tell a template to take no more programs, and to end with its last one.

    One that is stopped ends when it goes on.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(template.pid, signal.SIGTERM)


def start_and_wait() -> ListedTemplate:
    """Start a template that this process's programs use, unless one runs, and wait for it.

    Raises:
        NotStarted: it cannot be.
        OSError: likewise.
    """
    given = first_environment()
    key = key_of(given)
    if not (is_taken := place.is_taken(key)):
        start_template(given)
    path = place.socket_of(key)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        for found in templates():
            if found.socket == path and found.state == "stopped":
                raise NotStarted(str(found))
            if found.socket == path and found.state == "ready":
                return found
        had_one, is_taken = is_taken, place.is_taken(key)
        if reason := place.read_failure(key):
            raise NotStarted(reason)
        if had_one and not is_taken:  # it was told to end
            start_template(given)
        time.sleep(_LOOK_AGAIN_S)
    raise NotStarted(f"it does not serve after {_START_TIMEOUT_S:g} s")
