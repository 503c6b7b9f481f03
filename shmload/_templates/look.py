"""Templates as another process sees them: which there are, how one is started and ended."""

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass

from shmload._host.procfs import rollup_nbytes
from shmload._templates import place
from shmload._templates.identity import has_ended, is_stopped, key_of, said_of
from shmload._templates.start import start_template
from shmload._templates.variables import first_environment

_START_TIMEOUT_S = 120.0
# The socket appears when a template is ready; nothing tells of that.
_LOOK_AGAIN_S = 0.02


class NotStarted(Exception):
    """A template cannot be started; str says why."""


@dataclass(frozen=True, slots=True)
class ListedTemplate:
    """A template that runs.

    Fields:
        name: as it was given.
        pid: its process id.
        state: `ready`, or `draining`: it takes no more programs, and ends with its last one; or
            `stopped` by a signal.
        programs: how many run.
        memory_nbytes: its share of memory (PSS), in bytes.
        left_out: the modules that it was to import and cannot, each with the reason.
        socket: the path of its socket.
    """

    name: str
    pid: int
    state: str
    programs: int
    memory_nbytes: int
    left_out: list[str]
    socket: str


def templates() -> list[ListedTemplate]:
    """Return the templates of this user.

    Raises:
        place.PlaceUnsafe: their directory is not this user's alone.
    """
    found = []
    for entry in sorted(os.scandir(place.folder()), key=lambda each: each.name):
        if entry.name.endswith(".json"):
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                with open(entry.path, encoding="utf-8") as file:
                    said = json.load(file)
                pid, socket = int(said["pid"]), str(said["socket"])
                if socket not in (said_of(pid, "cmdline") or ""):  # it was killed
                    os.unlink(entry.path)
                    continue
                said["state"] = "stopped" if is_stopped(pid) else said["state"]
                children = said_of(pid, f"task/{pid}/children") or ""
                memory = rollup_nbytes(pid, "Pss:")
                found.append(
                    ListedTemplate(**said, programs=len(children.split()), memory_nbytes=memory)
                )
    return found


def end(template: ListedTemplate) -> None:
    """Tell a template to take no more programs, and to end with its last one.

    One that is stopped ends when it goes on.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(template.pid, signal.SIGTERM)


def start_and_wait(name: str, modules: tuple[str, ...] = ()) -> tuple[ListedTemplate, bool]:
    """Start a template that this process's programs use, unless one runs, and wait for it.

    Args:
        name: of the template.
        modules: see `start_template`.

    Returns:
        The template, and whether it ran before.

    Raises:
        NotStarted: it cannot be.
        OSError: likewise.
        place.PlaceUnsafe: see `place`.
    """
    key = key_of(name, first_environment())
    path = place.socket_of(key)
    pidfd = -1 if place.is_taken(key) else os.pidfd_open(start_template(name, modules))
    deadline = time.monotonic() + _START_TIMEOUT_S
    try:
        while time.monotonic() < deadline:
            is_over = pidfd >= 0 and has_ended(pidfd) and not place.is_taken(key)
            for found in templates():
                if found.socket == path and found.state != "draining":
                    if found.state == "stopped":
                        raise NotStarted(f"it is stopped; `kill -CONT {found.pid}`")
                    return found, pidfd < 0
            if is_over:
                raise NotStarted(place.read_failure(key) or "it has ended")
            time.sleep(_LOOK_AGAIN_S)
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    raise NotStarted(f"it does not serve after {_START_TIMEOUT_S:g} s")
