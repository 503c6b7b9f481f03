"""A template: a process that has imported the libraries once, and is copied for each program.

    imports ──▶ serves ──▶ drains ──▶ ends
       └── fails: a note says why

`start` starts it; its program calls `serve`. It imports the libraries, with a record of what
that did, and forks a spare. A caller connects and sends its call; the template hands it to the
spare, forks the next one, and tells the caller of stops and of the end.

Guarantee: it has one thread and has not touched a GPU, or it does not serve. Only this user reaches
it, with rights like its own. It takes no more programs when it was idle for long, when its
terminal's session ends, when it is told to end, or when a package that it has imported changes; it
ends with its last program, so that each caller learns how its program has ended.
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from shmload._templates import kind, leaving, messages, place, wire
from shmload._templates.connections import Connections, Peer, Question, refuse
from shmload._templates.freshness import Freshness
from shmload._templates.imports import Imports, Unfit
from shmload._templates.interpreter import Renewal
from shmload._templates.kept import LOOK_S, Kept
from shmload._templates.messages import About, Call, End, Look
from shmload._templates.recorder import Recorder
from shmload._templates.serving import Born, Serving
from shmload._templates.spare import Spare
from shmload._templates.stash import Stash
from shmload._templates.variables import first_environment, note_variables

IDLE_S = 1800.0
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN,
            signal.SIGTTOU, signal.SIGPIPE, signal.SIGXFSZ)  # fmt: skip
# After this time it looks whether it is alone in its control group, and ends if so.
_LONELY_S = 10.0


def serve(known: Collection[str], recorder: Recorder) -> Callable[[], Any]:
    """Be a template; return only in copies, with what runs their program.

    Args:
        known: names of the modules that were there before anything was imported.
        recorder: records since then.
    """
    socket, name, *wanted = sys.argv[2:]
    key = os.path.basename(socket)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    own_key = kind.key_of_this_process(name)
    del sys.path[: 0 if sys.flags.safe_path else 1]
    recorder.fresh["path"] = list(sys.path)
    lock = place.take_lock(key)
    if lock is None:
        os._exit(0)  # another one starts at the same time
    place.write_note(key, "imports", "\n".join(wanted))
    imports = Imports(key, recorder)
    try:
        if own_key != key:
            raise Unfit("what it was to have in common with its callers has changed since")
        imports.make(wanted)
        note_variables(recorder.variables)
    except BaseException as exc:  # a module may raise anything
        place.write_note(key, "failed", f"there can be no template: {type(exc).__name__}: {exc}")
        place.remove_note(key, "importing")
        os._exit(1)
    pid = os.getpid()
    try:
        Template(name, key, lock, imports, known).run()
    except Born as born:
        return born.run
    except BaseException:
        if os.getpid() == pid:
            place.write_note(key, "failed", f"the template failed: {traceback.format_exc()}")
        os._exit(1)


class Template:
    """Answers callers, keeps a spare, and watches the programs that run.

    Args:
        name: as the user gave it.
        key: see `kind`.
        lock: holds the right to be the template of this key.
        imports: what was imported.
        known: names of the modules that any Python has.
    """

    def __init__(
        self,
        name: str,
        key: str,
        lock: int,
        imports: Imports,
        known: Collection[str],
    ) -> None:
        self._name, self._key = name, key
        self._lock = lock
        self._recorder = recorder = imports.recorder
        before = first_environment()
        now = {os.fsdecode(name): os.fsdecode(value) for name, value in recorder.fresh["environ"]}
        # Python sets some by itself when it starts: LC_CTYPE in the locale C.
        self._coerced = {name: value for name, value in now.items() if name not in before}
        self._renewal = Renewal()
        self._stash = Stash(recorder, known)
        self._keep = imports.descriptors
        self._left_out = imports.left_out
        self._is_draining = False
        self._is_told_to_end = False
        self._used = time.monotonic()

    def run(self) -> NoReturn:
        """Serve; end this process, or raise `Born` in a copy."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._freshness = Freshness()
        self._rights = kind.rights_of()
        self._group = kind.leave_or_find()
        self._serving = serving = Serving(self._become_program)
        self._poll = serving.poll
        signal.signal(signal.SIGTERM, self._end_soon)
        session, terminal = kind.session_and_terminal()
        leader = os.pidfd_open(session) if terminal else -1
        if terminal:
            self._poll.register(leader, select.POLLIN)
        leaving.end_without_destructors()
        self._kept = Kept(self._stash, self._recorder)
        self._stash.hide()  # here and not in each copy: it writes to the memory of every module
        self._import_kept()
        self._freeze()
        collector: Any = self._stash.hidden.get("shmload._host.collector")
        if collector:
            collector.note_freeze()
        serving.fork()  # before the socket is there: the first caller finds it ready
        self._connections = Connections(place.socket_of(self._key), self._poll)
        while True:
            self._tend()
            ended, others = serving.wait(1000 * LOOK_S)
            if ended:
                self._used = time.monotonic()
            for fd in others:
                if fd == leader:
                    self._poll.unregister(leader)
                    self._drain()
                elif asked := self._connections.question_at(fd):
                    self._answer(*asked)

    def _tend(self) -> None:
        """Do what time or an event has brought."""
        idle = time.monotonic() - self._used
        is_lonely = idle > _LONELY_S and kind.is_alone_in(self._group)
        if self._is_told_to_end or (not self._serving.programs and (idle > IDLE_S or is_lonely)):
            self._drain()
        if self._is_draining and not self._serving.programs:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._connections.path)
            os._exit(0)
        if not self._is_draining and self._import_kept():
            self._serving.end_spare()
            self._freeze()
            self._serving.fork()

    def _import_kept(self) -> bool:
        """Import the modules of what loads have kept since the last time; tell if there were."""
        names = self._kept.new()
        if names:
            self._freshness.close()
            self._freshness = self._kept.make(names)
            note_variables(self._recorder.variables)
        return bool(names)

    def _freeze(self) -> None:
        """Have the collector leave all objects alone: to look at one would copy its page."""
        gc.collect()
        gc.freeze()

    def _become_program(self, orders: wire.Socket) -> Callable[[], Any]:
        """Become a spare, in a copy of this process, and then its program."""
        self._close_all()
        spare = Spare(self._stash, self._renewal, self._coerced, self._keep)
        return spare.wait(orders)

    def _close_all(self) -> None:
        """Close the sockets of the template, in a copy of it."""
        if hasattr(self, "_connections"):
            self._connections.close_all()
            self._serving.close_all()

    def _answer(self, question: Question, peer: Peer) -> None:
        reason = self._why_not(question, peer)
        if reason:
            refuse(peer, reason, is_replaceable=self._is_draining)
            return
        match question:
            case Call():
                self._start(question, peer)
                return
            case End():
                self._drain()
            case Look():
                with contextlib.suppress(OSError):
                    messages.send(peer.channel, self._about(), waits=False)
                if question.is_use:
                    self._used = time.monotonic()
        peer.close()

    def _about(self) -> About:
        found = {
            "name": self._name,
            "pid": os.getpid(),
            "state": "draining" if self._is_draining else "ready",
            "programs": self._serving.programs,
            "idle_s": time.monotonic() - self._used,
            "left_out": self._left_out,
            "processes": [os.getpid(), self._serving.spare],
        }
        return About(json.dumps(found))

    def _why_not(self, question: Question, peer: Peer) -> str:
        """Say why a process may not use this template; empty if it may.

        All processes of this user may look at it and end it. One with other rights may not run a
        program here.
        """
        if peer.user != os.geteuid():
            return "the template is another user's"
        if isinstance(question, Call) and (why := peer.how_it_differs(self._rights)):
            return f"this process may not use the template: {why}"
        if not isinstance(question, Call):
            return ""
        if self._is_draining:
            return "the template takes no more programs"
        if self._freshness.is_lost():
            self._drain()
            return "stale: a package has changed"
        return ""

    def _start(self, call: Call, peer: Peer) -> None:
        """Hand a program to the spare."""
        self._used = time.monotonic()
        try:
            self._serving.start(call, peer)
        except OSError as exc:
            refuse(peer, f"the template cannot start a process: {exc}")

    def _end_soon(self, *_: object) -> None:
        self._is_told_to_end = True

    def _drain(self) -> None:
        """Take no more programs; another template may take the place."""
        if self._is_draining:
            return
        self._is_draining = True
        with contextlib.suppress(OSError):  # the directory was removed
            self._connections.move(f"{self._connections.path}.{os.getpid()}")
        self._serving.end_spare()
        place.give_lock_back(self._lock)
