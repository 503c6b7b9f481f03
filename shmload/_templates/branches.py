"""The branches of a template: which pipelines have one, and which programs go to which."""

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from shmload._host.procfs import free_nbytes, memory_stall, rollup_nbytes
from shmload._templates import messages, wire
from shmload._templates.messages import Call, Noted, State
from shmload._templates.notes import Notes, Requests, warmed
from shmload._templates.wire import Socket

MAX_BRANCHES = 4
# What programs find free in any case.
_RESERVE_NBYTES = 512 << 20
# What a branch takes until it has loaded; it was up to 120 MiB.
_ROOM_NBYTES = 256 << 20
# All tasks stood still for want of memory, in percent of the last ten seconds. Some wait also where
# gigabytes are available and fresh pages come slowly.
_MAX_STALL = 10.0
# The memory of branches is looked at this often.
LOOK_S = 5.0
# A pipeline that had no branch is tried again after this time.
_REFUSED_S = 600.0
# It has loaded for so long: a file system does not answer, say.
_LOAD_S = 300.0
# In the text of a request.
_KEPT = '"keep":true'


@dataclass
class _KnownBranch:
    """A branch as its template knows it."""

    pid: int
    channel: Socket
    requests: Requests
    began: float = field(default_factory=time.monotonic)
    state: State = field(default_factory=lambda: State(0, 0, 0, 0, 0, ""))

    @property
    def nbytes(self) -> int:
        """The memory that goes when it ends, in bytes."""
        return self.state.nbytes or rollup_nbytes(self.pid, "Private_")

    @property
    def word(self) -> str:
        """Its state in a word."""
        if not self.state.is_ready:
            return "loading"
        return "ready" if self.state.loaded == len(self.requests) else "imported"


class Branches:
    """Starts branches for the pipelines that programs have loaded last, and ends them.

    Args:
        key: of the template.
        poll: of the template; told of the sockets to watch.
        become: called in a copy of the template, with the socket to it and the pipelines; it ends
            the copy, or raises `Born`.
        can_load: whether the template has imported what loads pipelines.
    """

    def __init__(
        self,
        key: str,
        poll: select.poll,
        become: Callable[[Socket, Requests, list[list[str]]], NoReturn],
        *,
        can_load: bool,
    ) -> None:
        self._poll = poll
        self._become = become
        self._can_load = can_load
        self._notes = Notes(key)
        self._wanted = self._notes.all()
        """What programs load together, last used first."""
        self._running: dict[Requests, _KnownBranch] = {}
        self._refused: dict[Requests, tuple[str, float]] = {}
        """Why some pipelines have no branch, and until when none is tried."""
        self._renewed: dict[Requests, float] = {}
        """When branches that could not load were ended, since they could from then on."""
        self._leaving: set[int] = set()
        """Branches that drain."""
        self._looked = 0.0

    def __len__(self) -> int:
        return len(self._running) + len(self._leaving)

    @property
    def programs(self) -> int:
        """How many programs run in copies of branches."""
        return sum(branch.state.programs for branch in self._running.values())

    @property
    def processes(self) -> list[int]:
        """The process ids of branches and their spares."""
        return [pid for each in self._running.values() for pid in (each.pid, each.state.spare)]

    def about(self) -> list[dict[str, object]]:
        """Return the fields of a `look.ListedBranch` for each, and each pipeline that has none."""
        found = [
            (each.pid, each.word, each.nbytes, requests, each.state.reason)
            for requests, each in self._running.items()
        ]
        found += [(0, "none", 0, requests, why) for requests, (why, _) in self._refused.items()]
        return [
            {"pid": pid, "state": word, "private_nbytes": nbytes, "reason": reason,
             "sources": [*map(_source_of, requests)]}
            for pid, word, nbytes, requests, reason in found
        ]  # fmt: skip

    def hand_over(self, call: Call, channel: Socket) -> bool:
        """Have a branch run a program; return False if there is none for it.

        Args:
            call: of the program.
            channel: its caller's socket, which stays the calling code's.
        """
        if not call.program.prepares:
            return False
        branch = self._choose(self._notes.of(call.name))
        if branch is None:
            return False
        try:
            messages.send(branch.channel, call, (channel.fileno(),), waits=False)
        except OSError:  # it ends
            return False
        self._use(branch.requests)
        return True

    def note(self, noted: Noted) -> None:
        """Note what a program has loaded, and start a branch for the next run."""
        requests = tuple(noted.requests)
        wanted = self._notes.add(noted.program, requests, noted.modules)
        self._use(wanted)
        for branch in list(self._running.values()):
            if branch.pid == noted.parent and (noted.is_stale or self._may_load(branch, noted)):
                self._end(branch)

    def read_warmed(self) -> None:
        """Look again which pipelines `shmload warm` has read."""
        for branch in list(self._running.values()):
            is_imported = branch.word == "imported" and not branch.state.reason
            if is_imported:  # perhaps it can be loaded now
                self._end(branch)
        new = [(each,) for each in warmed()]
        self._wanted = new + [each for each in self._wanted if each not in new]

    def tend(self) -> None:
        """Start and end branches, as there is memory.

        Raises:
            Born: in a copy.
        """
        now = time.monotonic()
        self._end_late(now)
        if self._running and now - self._looked > LOOK_S:
            self._looked = now
            running = self._least_used_first()
            private = [branch.nbytes for branch in running]
            for branch in running[: branches_to_end(private, _available_nbytes())]:
                self._end(branch)
        if not self._can_load or any(not each.state.is_ready for each in self._running.values()):
            return  # one at a time: they leave the processor to programs
        self._refused = {k: v for k, v in self._refused.items() if v[1] >= now}
        wanted = [each for each in self._wanted if each not in self._refused]
        for requests in wanted[:MAX_BRANCHES]:
            if requests not in self._running:
                if has_room(_available_nbytes()):
                    self._fork(requests)
                return

    def state_at(self, fd: int) -> bool:
        """Read what a branch says, if this is the socket of one; tell whether it is."""
        for branch in list(self._running.values()):
            if branch.channel.fileno() != fd:
                continue
            try:
                found = messages.receive(branch.channel, State)
            except (OSError, ValueError):
                found = None
            if found is None:
                if not branch.state.is_ready:
                    self._refuse(branch.requests, "it has ended while it loaded")
                self._end(branch)
            elif found[0].reason and not found[0].is_ready:
                self._refuse(branch.requests, found[0].reason)
            else:
                branch.state = found[0]
            return True
        return False

    def on_child_exit(self, pid: int) -> None:
        """Forget a branch that was this process, if one was."""
        self._leaving.discard(pid)
        for branch in list(self._running.values()):
            if branch.pid == pid:
                while branch.requests in self._running and self.state_at(branch.channel.fileno()):
                    continue
                self._leaving.discard(pid)

    def end(self) -> None:
        """Have all drain; there are none from now on."""
        self._can_load = False
        for branch in list(self._running.values()):
            self._end(branch)

    def close_all(self) -> None:
        """Close all sockets, in a copy of the template."""
        for branch in self._running.values():
            branch.channel.close()

    def _may_load(self, branch: _KnownBranch, noted: Noted) -> bool:
        """Tell whether a branch without its pipeline can have it now, since a load has kept it.

        Once in a while: what has no room beside others is soon removed again.
        """
        if branch.word != "imported" or branch.state.reason or _KEPT not in noted.requests[-1]:
            return False
        now = time.monotonic()
        if now - self._renewed.get(branch.requests, -_REFUSED_S) < _REFUSED_S:
            return False
        self._renewed = {k: v for k, v in self._renewed.items() if now - v < _REFUSED_S}
        self._renewed[branch.requests] = now
        return True

    def _end_late(self, now: float) -> None:
        """End a branch that loads for too long: there are no others meanwhile."""
        for branch in list(self._running.values()):
            if not branch.state.is_ready and now - branch.began > _LOAD_S:
                self._refuse(branch.requests, f"its load took more than {_LOAD_S:.0f} s")
                self._end(branch)

    def _choose(self, requests: Requests) -> _KnownBranch | None:
        """Return the branch for what a program will load: its own, or one that has that and more.

        A program that is not known gets the one that was used last: what it has more than the
        template is hidden, and the program may load the same.
        """
        ready = [each for each in reversed(self._least_used_first()) if each.state.is_ready]
        fitting = [each for each in ready if set(requests) <= set(each.requests)]
        exact = [each for each in fitting if each.requests == requests]
        return next(iter(exact + fitting), None)

    def _least_used_first(self) -> list[_KnownBranch]:
        places = {requests: place for place, requests in enumerate(self._wanted)}
        running = self._running.values()
        return sorted(running, key=lambda each: -places.get(each.requests, len(places)))

    def _refuse(self, requests: Requests, reason: str) -> None:
        """Note why pipelines have no branch; the cause may pass."""
        self._refused.setdefault(requests, (reason, time.monotonic() + _REFUSED_S))

    def _use(self, requests: Requests) -> None:
        self._wanted = [requests, *(each for each in self._wanted if each != requests)]

    def _fork(self, requests: Requests) -> None:
        if len(self._running) >= MAX_BRANCHES:
            self._end(self._least_used_first()[0])
        try:
            pid, channel = wire.fork()
        except OSError as exc:  # no descriptor, no process or no memory is left
            self._refuse(requests, str(exc))
            return
        if pid == 0:
            self._become(channel, requests, [self._notes.modules_of(each) for each in requests])
        channel.setblocking(False)
        self._poll.register(channel.fileno(), select.POLLIN)
        self._running[requests] = _KnownBranch(pid, channel, requests)

    def _end(self, branch: _KnownBranch) -> None:
        """Have a branch drain; one that still loads is killed."""
        self._running.pop(branch.requests)
        self._poll.unregister(branch.channel.fileno())
        branch.channel.close()
        self._leaving.add(branch.pid)
        if not branch.state.is_ready:
            with contextlib.suppress(ProcessLookupError):  # it was reaped just now
                os.kill(branch.pid, signal.SIGKILL)


def _source_of(request: str) -> str:
    try:
        return str(json.loads(request)["source"])
    except (ValueError, TypeError, KeyError):  # whoever has noted it could write anything
        return "?"


def branches_to_end(private: Sequence[int], available: int) -> int:
    """Return how many branches have to end, the least recently used first.

    Args:
        private: the memory of each that it has for itself, least recently used first.
        available: what is available to others, in bytes.
    """
    ends = max(0, len(private) - MAX_BRANCHES)
    while ends < len(private) and available + sum(private[:ends]) < _RESERVE_NBYTES:
        ends += 1
    return ends


def has_room(available: int) -> bool:
    """Tell whether there is memory for one more branch."""
    return available >= _RESERVE_NBYTES + _ROOM_NBYTES


def _available_nbytes() -> int:
    """Return the memory that processes like this one can still have; 0 while they wait for it."""
    return 0 if memory_stall("full") > _MAX_STALL else free_nbytes()
