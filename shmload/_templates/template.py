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
from dataclasses import dataclass
from typing import Any, NoReturn

from shmload._templates import ahead, cgroups, kind, leaving, messages, place
from shmload._templates.connections import Connections, Question, refuse
from shmload._templates.freshness import Freshness
from shmload._templates.imports import Imports
from shmload._templates.messages import About, Call, End, Keep
from shmload._templates.pipelines import PIPELINES, Pipelines
from shmload._templates.programs import Programs, Running
from shmload._templates.recorder import Recorder
from shmload._templates.renewal import Renewal
from shmload._templates.spare import Spare
from shmload._templates.spares import Born, Spares
from shmload._templates.stash import Stash

IDLE_S = 1800.0
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTTIN,
            signal.SIGTTOU, signal.SIGPIPE, signal.SIGXFSZ)  # fmt: skip
# It looks this often whether it is alone in its control group, and ends if so.
_LOOK_AROUND_S = 10.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Which template this is: its name, its key, and what it has in common with its callers."""

    name: str
    key: str
    facts: str


def serve(known: Collection[str], recorder: Recorder) -> Callable[[], Any]:
    """Be a template; return only in copies, with what runs their program.

    Args:
        known: names of the modules that were there before anything was imported.
        recorder: records since then.
    """
    orders = json.loads(sys.argv[2])
    name, *wanted = orders["modules"]
    key = orders["key"]
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    facts = kind.facts_of_this_process(name)
    del sys.path[: 0 if sys.flags.safe_path else 1]
    recorder.fresh["path"] = list(sys.path)
    lock = place.take_lock(key)
    if lock is None:
        os._exit(0)  # another one starts at the same time
    place.write_note(key, "imports", "\n".join(wanted))
    imports = Imports(key, recorder)
    try:
        imports.make(wanted)
        kind.note_variables(recorder.variables)
    except BaseException as exc:  # a module may raise anything
        place.write_failure(key, f"there can be no template: {type(exc).__name__}: {exc}")
        place.remove_note(key, "importing")
        os._exit(1)
    pid = os.getpid()
    try:
        Template(Identity(name, key, facts), lock, recorder, known, imports).run()
    except Born as born:
        return born.run
    except BaseException:
        if os.getpid() == pid:
            place.write_failure(key, f"the template failed: {traceback.format_exc()}")
        os._exit(1)


class Template:
    """Answers callers, keeps a spare, and watches the programs that run.

    Args:
        identity: which one it is.
        lock: holds the right to be the template of this key.
        recorder: of the imports.
        known: names of the modules that any Python has.
        imports: what was imported.
    """

    def __init__(
        self,
        identity: Identity,
        lock: int,
        recorder: Recorder,
        known: Collection[str],
        imports: Imports,
    ) -> None:
        self._identity = identity
        self._lock = lock
        self._recorder = recorder
        before = kind.first_environment()
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
        self._group = cgroups.leave_or_find()
        waking, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end_soon)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        self._poll = select.poll()
        self._poll.register(waking, select.POLLIN)
        session, terminal = kind.session_and_terminal()
        leader = os.pidfd_open(session) if terminal else -1
        if terminal:
            self._poll.register(leader, select.POLLIN)
        leaving.end_without_destructors()
        self._pipelines = Pipelines(self._identity.key, sys.modules, self._stash)
        self._stash.hide()  # here and not in each copy: it writes to the memory of every module
        gc.collect()
        gc.freeze()
        collector: Any = self._stash.hidden.get("shmload._host.collector")
        if collector:
            collector.note_freeze()
        ahead.add_step(PIPELINES, self._pipelines.prepare)
        self._programs = Programs(self._poll)
        self._spares = Spares(self._become_program, self._pipelines.work)
        self._spares.fork()  # before the socket is there: the first caller finds it ready
        self._connections = Connections(place.socket_of(self._identity.key), self._poll)
        while True:
            self._tend()
            for fd, _ in self._poll.poll(self._wait_ms()):
                if fd == waking:
                    with contextlib.suppress(BlockingIOError):
                        os.read(waking, 1 << 10)
                    self._reap()
                elif fd == leader:
                    self._poll.unregister(leader)
                    self._drain()
                else:
                    self._programs.end_if_lost(fd)
                    question = self._connections.question_at(fd)
                    if question:
                        self._answer(question)

    def _wait_ms(self) -> float:
        times = [_LOOK_AROUND_S, self._connections.wait_s(), self._spares.wait_s()]
        return 1000 * min(found for found in times if found is not None)

    def _tend(self) -> None:
        """Do what time brings."""
        idle = time.monotonic() - self._used
        if self._is_told_to_end:
            self._drain()
        may_end = not self._programs and not self._is_draining
        is_lonely = idle > _LOOK_AROUND_S and cgroups.is_alone_in(self._group)
        if may_end and (idle > IDLE_S or is_lonely):
            self._drain()
        if self._is_draining and not self._programs:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._connections.path)
            os._exit(0)
        self._connections.tend()
        if not self._is_draining:
            self._spares.tend()

    def _become_program(self, orders: Any, works_ahead: bool) -> Callable[[], Any]:
        """Become a spare, in a copy of this process, and then its program."""
        if hasattr(self, "_connections"):
            self._connections.close_all()
        self._programs.close_all()
        spare = Spare(self._stash, self._renewal, self._coerced, self._keep, self._pipelines)
        return spare.wait(orders, works_ahead=works_ahead)

    def _answer(self, question: Question) -> None:
        match question.message:
            case Call():
                self._start(question.message, question)
                return
            case End():
                self._drain()
            case _:
                idle_ms = int(1000 * (time.monotonic() - self._used))
                ahead = []
                if self._spares.has_worked():
                    ahead = self._pipelines.sources()
                about = About(os.getpid(), self._identity.name, len(self._programs), idle_ms,
                              int(self._is_draining), self._spares.pid, ahead,
                              self._left_out)  # fmt: skip
                if isinstance(question.message, Keep):
                    self._used = time.monotonic()
                with contextlib.suppress(OSError):
                    messages.send(question.channel, about, waits=False)
        question.close()

    def _start(self, call: Call, question: Question) -> None:
        """Hand a program to the spare, or refuse it."""
        self._used = time.monotonic()
        refusal = self._refusal(call)
        pid = 0
        if not refusal:
            try:
                pid = self._spares.hand_over(call, (question.channel.fileno(), question.peer.fd))
            except OSError as exc:
                refusal = f"the template cannot start a process: {exc}"
        if refusal:
            refuse(question.channel, refusal, is_replaceable=self._is_draining)
            question.close()
            return
        self._programs.add(pid, Running(question.channel, question.peer))
        self._spares.fork()

    def _refusal(self, call: Call) -> str | None:
        if self._is_draining:
            return "the template takes no more programs"
        if call.facts != self._identity.facts:
            return "this process differs from the template"
        if self._freshness.is_lost():
            self._drain()
            return "stale: a package has changed"
        return None

    def _reap(self) -> None:
        """Learn what has become of children, and tell their callers."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            except ChildProcessError:
                break
            if pid == 0:
                break
            self._programs.child_has_changed(pid, status)
            if not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status):
                self._spares.has_ended(pid)
        self._used = time.monotonic()

    def _end_soon(self, *_: object) -> None:
        self._is_told_to_end = True

    def _drain(self) -> None:
        """Take no more programs; another template may take the place."""
        if self._is_draining:
            return
        self._is_draining = True
        with contextlib.suppress(OSError):  # the directory was removed
            self._connections.move(f"{self._connections.path}.{os.getpid()}")
        self._spares.end()
        place.give_lock_back(self._lock)
