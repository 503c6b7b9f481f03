"""Templates as another process sees them: which run, and how one is told to end."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from shmload._templates import kind, messages, place, wire
from shmload._templates.imports import how_it_crashed
from shmload._templates.messages import About, End, Look, Message, Noted
from shmload._templates.rights import has_ended, read_status
from shmload._templates.start import start_template

_ANSWER_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 120.0
# The socket appears when a template is ready; nothing tells of that.
_LOOK_AGAIN_S = 0.02


class NotStarted(Exception):
    """A template cannot be started; str says why."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A copy of a template that has loaded pipelines, or is to.

    Fields:
        pid: its process id; 0 if there is none.
        state: `loading`, `ready`, `imported` if it has only the modules of a pipeline, or `none`.
        private_nbytes: the memory that it has for itself alone, in bytes.
        sources: of the pipelines.
        reason: why there is none; else empty.
    """

    pid: int
    state: str
    private_nbytes: int
    sources: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Template:
    """A template that runs.

    Fields:
        name: as it was given.
        pid: its process id.
        state: `ready`, or `draining`: it takes no more programs, and ends with its last one; or
            `stopped` by a signal: then only `pid`, `memory_nbytes` and `socket` are known.
        programs: how many run.
        idle_s: how long ago a program came or ended, in seconds.
        memory_nbytes: its share of memory (PSS), with its branches and the copies that wait for
            programs, in bytes.
        ahead: the sources of the pipelines that are loaded.
        branches: its branches, and why some pipelines have none.
        left_out: the modules that it was to import and has not, each with the reason.
        socket: the path of its socket.
    """

    name: str
    pid: int
    state: str
    programs: int
    idle_s: float
    memory_nbytes: int
    ahead: tuple[str, ...]
    branches: tuple[Branch, ...]
    left_out: tuple[str, ...]
    socket: str


def templates() -> Iterator[Template]:
    """Yield the templates of this user.

    Raises:
        place.PlaceUnsafe: their directory is not this user's alone.
    """
    for path in place.sockets():
        found = template_at(path)
        if found:
            yield found


def template_at(path: str) -> Template | None:
    """Return the template that answers at a socket, or is stopped; None if there is none."""
    answer = _ask(path, Look(0))
    if isinstance(answer, int):
        return Template("?", answer, "stopped", 0, 0.0, _memory_of(answer), (), (), (), path)
    if answer is None:
        return None
    branches = [
        Branch(
            each.pid, each.state, each.nbytes, tuple(map(_source_of, each.requests)), each.reason
        )
        for each in answer.branches
    ]
    processes = [answer.pid, answer.spare]
    processes += [pid for each in answer.branches for pid in (each.pid, each.spare)]
    return Template(
        name=answer.name,
        pid=answer.pid,
        state="draining" if answer.is_draining else "ready",
        programs=answer.programs,
        idle_s=answer.idle_ms / 1000,
        memory_nbytes=sum(map(_memory_of, filter(None, processes))),
        ahead=tuple(
            source for each in branches if each.state == "ready" for source in each.sources
        ),
        branches=tuple(branches),
        left_out=tuple(answer.left_out),
        socket=path,
    )


def tell_all(noted: Noted) -> None:
    """Tell all templates of this user of pipelines."""
    for path in place.sockets():
        _ask(path, noted)


def keep(path: str) -> bool:
    """Tell whether a template at a socket takes programs, and have it not end from idleness."""
    answer = _ask(path, Look(1))
    return isinstance(answer, About) and not answer.is_draining


def end(template: Template) -> None:
    """Tell a template to take no more programs, and to end with its last one.

    One that is stopped ends when it goes on.
    """
    _ask(template.socket, End())


def running(name: str) -> Template | None:
    """Return the template that this process's programs use; None if none runs.

    Args:
        name: of the template.
    """
    return template_at(place.socket_of(kind.key_of(kind.facts_of_this_process(name))))


def start_and_wait(name: str, modules: tuple[str, ...] = ()) -> Template:
    """Start a template that this process's programs use, unless one runs, and wait for it.

    Args:
        name: of the template.
        modules: see `start_template`.

    Raises:
        NotStarted: it cannot serve, or has not within two minutes.
        OSError: no process can be started.
    """
    key = kind.key_of(kind.facts_of_this_process(name))
    found = template_at(place.socket_of(key)) or _start(name, key, modules)
    if found.state == "stopped":
        raise NotStarted(f"process {found.pid}, which is it, is stopped; `kill -CONT {found.pid}`")
    if key == kind.key_of(kind.facts_of_this_process(name)):
        return found
    end(found)  # its imports have read variables that it did not get
    return start_and_wait(name, modules)


def _start(name: str, key: str, modules: tuple[str, ...]) -> Template:
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
                raise NotStarted(reason or how_it_crashed(key) or "it has ended")
            time.sleep(_LOOK_AGAIN_S)
    finally:
        os.close(pidfd)
    raise NotStarted(f"it does not serve after {_START_TIMEOUT_S:g} s")


def _ask(path: str, message: Message) -> About | int | None:
    """Return what a template answers, or its process id if it is stopped; None if neither."""
    pid = 0
    channel = wire.open_socket()
    channel.settimeout(_ANSWER_TIMEOUT_S)
    try:
        channel.connect(path)
        pid, *_ = wire.peer_of(channel)
        messages.send(channel, message)
        found = messages.receive(channel, About)
    except TimeoutError:
        return pid if _is_stopped(pid) else None
    except (OSError, ValueError):  # it ends, or is of another version
        return None
    finally:
        channel.close()
    return found[0] if found else None


def _is_stopped(pid: int) -> bool:
    try:
        return read_status(pid)["State"].startswith(("T", "t"))
    except OSError:
        return False


def _source_of(request: str) -> str:
    try:
        return str(json.loads(request)["source"])
    except (ValueError, TypeError, KeyError):
        return "?"


def _memory_of(pid: int) -> int:
    """Return a process's share of memory (PSS), in bytes."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0
