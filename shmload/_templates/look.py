"""Templates as another process sees them: which run, how one is told to end, or held ready."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shmload._host.procfs import rollup_nbytes
from shmload._templates import kind, messages, place, wire
from shmload._templates.caller import SHMLOAD
from shmload._templates.kind import flags_of_this_process, has_ended, is_stopped
from shmload._templates.messages import About, End, Look, Message
from shmload._templates.start import start_template
from shmload._wording import logger_of

logger = logger_of(__name__)

_ANSWER_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 120.0
# The socket appears when a template is ready; nothing tells of that.
_LOOK_AGAIN_S = 0.02


_HELD_AGAIN_S = 2.0
_END_TIMEOUT_S = 10.0
# After a failed start; a module that was edited may make the next one succeed.
_PAUSE_S = 60.0


class NotStarted(Exception):
    """A template cannot be started; str says why."""


@dataclass(frozen=True, slots=True)
class ListedTemplate:
    """A template that runs.

    Fields:
        name: as it was given.
        pid: its process id.
        state: `ready`, or `draining`: it takes no more programs, and ends with its last one; or
            `stopped` by a signal: then only `pid`, `memory_nbytes` and `socket` are known.
        programs: how many run.
        idle_s: how long ago a program came or ended, in seconds.
        memory_nbytes: its share of memory (PSS), with the copy that waits for a program, in bytes.
        left_out: the modules that it was to import and has not, each with the reason.
        socket: the path of its socket.
    """

    name: str
    pid: int
    state: str
    programs: int
    idle_s: float
    memory_nbytes: int
    left_out: list[str]
    socket: str


def templates() -> Iterator[ListedTemplate]:
    """Yield the templates of this user.

    Raises:
        place.PlaceUnsafe: their directory is not this user's alone.
    """
    for path in place.sockets():
        found = template_at(path)
        if found:
            yield found


def template_at(path: str) -> ListedTemplate | None:
    """Return the template that answers at a socket, or is stopped; None if there is none."""
    answer = _ask(path, Look(0))
    if isinstance(answer, int):
        nbytes = rollup_nbytes(answer, "Pss:")
        return ListedTemplate("?", answer, "stopped", 0, 0.0, nbytes, [], path)
    if answer is None:
        return None
    said = json.loads(answer.template)
    nbytes = sum(rollup_nbytes(pid, "Pss:") for pid in said.pop("processes") if pid)
    return ListedTemplate(**said, memory_nbytes=nbytes, socket=path)


def keep(path: str) -> bool:
    """Tell whether a template at a socket takes programs, and have it not end from idleness."""
    answer = _ask(path, Look(1))
    return isinstance(answer, About) and json.loads(answer.template)["state"] == "ready"


def end(template: ListedTemplate) -> None:
    """Tell a template to take no more programs, and to end with its last one.

    One that is stopped ends when it goes on.
    """
    _ask(template.socket, End())


def running(name: str) -> ListedTemplate | None:
    """Return the template that this process's programs use; None if none runs.

    Args:
        name: of the template.
    """
    return template_at(place.socket_of(kind.key_of_this_process(name)))


def start_and_wait(name: str, modules: tuple[str, ...] = ()) -> ListedTemplate:
    """Start a template that this process's programs use, unless one runs, and wait for it.

    Args:
        name: of the template.
        modules: see `start_template`.

    Raises:
        NotStarted: it cannot serve, or has not within two minutes.
        OSError: no process can be started.
    """
    key = kind.key_of_this_process(name)
    found = template_at(place.socket_of(key)) or _start(name, key, modules)
    if found.state == "stopped":
        raise NotStarted(f"process {found.pid}, which is it, is stopped; `kill -CONT {found.pid}`")
    if key == kind.key_of_this_process(name):
        return found
    end(found)  # its imports have read variables that it did not get
    return start_and_wait(name, modules)


def _start(name: str, key: str, modules: tuple[str, ...]) -> ListedTemplate:
    path = place.socket_of(key)
    pidfd = os.pidfd_open(start_template(name, key, modules))
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline:
            # Another one may have been there first, and this one has left it the place.
            is_over = has_ended(pidfd) and not place.is_taken(key)
            found = template_at(path)
            if found:
                return found
            reason = place.read_failure(key)
            if reason or is_over:
                raise NotStarted(reason or place.how_it_crashed(key) or "it has ended")
            time.sleep(_LOOK_AGAIN_S)
    finally:
        os.close(pidfd)
    raise NotStarted(f"it does not serve after {_START_TIMEOUT_S:g} s")


def _ask(path: str, message: Message) -> About | int | None:
    """Return what a template answers, or its process id if it is stopped; None if neither."""
    pid = 0
    try:
        with contextlib.closing(wire.connect(path, _ANSWER_TIMEOUT_S)) as channel:
            pid, _ = wire.peer_of(channel)
            messages.send(channel, message)
            if is_stopped(pid):
                return pid
            found = messages.receive(channel, About)
    except TimeoutError:
        return pid if is_stopped(pid) else None
    except (OSError, ValueError):  # it ends, or is of another version
        return None
    return found[0] if found else None


class Keeper:
    """Holds a template ready (`shmload serve --template`).

    It starts one, and another one when it ends or is stale, until `close`.

    Programs find it that have this process's variables, cores and rights, and no terminal or the
    same one. It stays when the keeper ends, and ends by itself when it was idle for long.

    Args:
        name: of the template.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_over = threading.Event()
        self._starting: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="template-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; a template that is just being started goes on by itself."""
        self._is_over.set()
        self._thread.join(_END_TIMEOUT_S)
        if self._starting:
            self._starting.kill()
            self._starting.wait(_END_TIMEOUT_S)

    def _keep(self) -> None:
        while True:
            with contextlib.suppress(OSError, place.PlaceUnsafe):
                self._look_after()
            if self._is_over.wait(_HELD_AGAIN_S):
                return

    def _look_after(self) -> None:
        """Start a template if none is ready and none is being started."""
        key = kind.key_of_this_process(self._name)
        if self._starting is not None:
            if self._starting.poll() is None:
                return
            if self._starting.returncode != 0:
                reason = place.read_failure(key) or place.how_it_crashed(key)
                logger.warning("the template %s cannot be started: %s", self._name, reason)
                self._is_over.wait(_PAUSE_S)
            self._starting = None
        if keep(place.socket_of(key)) or place.is_taken(key):
            return
        # A process of its own: this one has threads, and a copy of it would have their locks.
        command = [sys.executable, *flags_of_this_process(), "-c", SHMLOAD, "template"]
        self._starting = subprocess.Popen(
            [*command, "warm", "--name", self._name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        logger.info("starting the template %s", self._name)
