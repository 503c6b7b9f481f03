"""The judge: a process that makes skeletons, or finds out why models can have none.

One per user and machine. It waits, small, until the machine is idle enough; then it imports the
libraries and works off what waits (`queued`), newest first. It forks for each request, so that none
sees what another one has left:

    judge ─ imports the libraries; looks on, and ends what takes too much
      └ examiner ─ one request; it has a deadline
          ├ builds twice, traced, and compares with what a skeleton gives ─▶ the skeleton
          └ looks at all objects
              ├ builds twice                    ─▶ what that leaves ┐ are they the same?
              └ builds twice from the skeleton  ─▶ what that leaves ┘

It reads no weights: models are built over stand-ins. It writes to the cache of the program that
asked, which it holds by descriptor: when that is gone, it is not made anew.
"""

import contextlib
import os
import pickle
import resource
import select
import signal
import time

import msgspec

from shmload._building.limited import fork, in_child
from shmload._building.queued import Program, Queue, Work, queue
from shmload._host.descriptors import Lock
from shmload._host.idleness import free_nbytes, give_way, observe, why_wait
from shmload._host.procfs import private_nbytes
from shmload._settings import settings
from shmload._wording import logger_of

logger = logger_of(__name__)

# Processor time of one judge, in seconds.
_MOST_CPU_S = 120.0
# What its processes may take together, without what they share, in bytes; and what must be free.
_MOST_NBYTES = 2 << 30
_NEEDED_NBYTES = 1 << 30
# It waits so long for an idle machine, and then so long for the next request, in seconds.
_WAIT_S = 600.0
_STAY_S = 10.0
_LOOK_S = 2.0
_WATCH_S = 0.5


def main(program: str, lock: str) -> None:
    """Work off what waits, and return.

    Args:
        program: what this process is, as JSON.
        lock: the number of the descriptor of the judge's lock, which is held; this process's own.
    """
    give_way()
    # A thread that blocks signals may have started this: deadlines are signals here.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_inheritable(int(lock), False)
    with Lock(int(lock)) as held:
        Judge(queue(), held, msgspec.json.decode(program, type=Program)).run()


class Judge:
    """Works off a queue.

    Args:
        waiting: the queue.
        lock: of the queue, held; stays the caller's.
        program: what this process is.
    """

    def __init__(self, waiting: Queue, lock: Lock, program: Program) -> None:
        self._queue = waiting
        self._lock = lock
        self._program = program
        self._has_imported = False
        self._has_waited = False

    def run(self) -> None:
        """Work until nothing waits, or the machine is not idle for too long, or enough is done."""
        if left := self._queue.taken():
            self._give_up(left, "the judge was killed")
        while self._wait_for_room():
            self._work()
            if not self._may_go_on:
                break
        # A program that has found the lock taken relies on this process.
        self._lock.give_back()
        if self._may_go_on and any(self._queue.waiting()) and self._lock.take_again():
            self._become(self._program)

    def _wait_for_room(self) -> bool:
        """Block until the machine is idle; return False if that takes too long, or nothing waits.

        More may come for a while after work.
        """
        now = time.monotonic()
        until, until_more = now + _WAIT_S, now + (_STAY_S if self._has_imported else 0.0)
        while True:
            if not any(self._queue.waiting()):
                if time.monotonic() >= until_more:
                    return False
                time.sleep(_WATCH_S)
                continue
            reason = why_wait(observe(_LOOK_S), _NEEDED_NBYTES)
            if not reason:
                return True
            if self._has_imported:
                self._become(self._program)  # gives the memory back while it waits
            if time.monotonic() > until:
                logger.info("the judge ends: %s", reason)
                self._has_waited = True
                return False

    def _work(self) -> None:
        """Work off the newest request."""
        found = next(self._queue.waiting(), None)
        if found is None:
            return
        path, work = found
        if work.program != self._program:
            self._become(work.program)
        if not self._has_imported:
            self._has_imported = True
            _import_libraries()
        taken = self._queue.take(path)  # it may be another one by now
        if taken is None:
            return
        if why := _watch(fork(lambda: make(taken)), taken.cache):
            self._give_up(taken, why)
        else:
            self._queue.done()

    def _give_up(self, work: Work, why: str) -> None:
        from shmload._segments.view import remove_dead_views

        remove_dead_views()  # its own
        self._queue.done()
        with contextlib.suppress(Exception):  # it is then asked for again
            in_child(lambda: note(work, why))

    @property
    def _may_go_on(self) -> bool:
        if self._has_waited:
            return False
        kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        used = (resource.getrusage(kind) for kind in kinds)
        return sum(each.ru_utime + each.ru_stime for each in used) < _MOST_CPU_S

    def _become(self, program: Program) -> None:
        """Begin anew, as the judge of a program; the lock stays held."""
        os.set_inheritable(self._lock.fd, True)
        command = program.command(self._lock)
        try:
            os.execve(command[0], command, program.environment)
        except OSError as exc:  # an environment that was removed
            logger.info("no judge for %s: %s", program.executable, exc)
            for path, work in self._queue.waiting():
                if work.program == program:
                    path.unlink(missing_ok=True)


def use_cache(work: Work) -> None:
    """Let this process's settings name the cache of some work, by a descriptor.

    If the path leads to another folder later, the descriptor still holds this one.

    Raises:
        OSError: it is gone.
    """
    fd = os.open(work.cache, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.environ["SHMLOAD_CACHE_DIR"] = f"/proc/self/fd/{fd}"
    settings.cache_clear()


def make(work: Work) -> None:
    """Make the skeleton that some work asks for, in a process of its own.

    Raises:
        OSError: it cannot be written.
    """
    # Not at the top: while the judge waits, it has imported no library.
    from shmload._building.examining import examine
    from shmload._building.skeletons import skeleton_memo

    use_cache(work)
    request = pickle.loads(work.request)
    os.chdir(request.directory)
    skeleton_memo(request.key).write(examine(request))


def note(work: Work, why: str) -> None:
    """Note why work was not done, in a process of its own.

    Raises:
        OSError: that cannot be written.
    """
    from shmload._building.skeletons import Skeleton, skeleton_memo

    use_cache(work)
    request = pickle.loads(work.request)
    skeleton_memo(request.key).write(Skeleton.of(request, reason=why, is_final=False))


def _watch(child: int, cache: str) -> str:
    """Wait for an examiner, and kill it if it takes too much or works for nothing; reap it.

    Returns:
        Why it has not done its work; nothing if it has.
    """
    why = ""
    with open(os.pidfd_open(child), "rb") as ended:
        while not select.select([ended], [], [], _WATCH_S)[0]:
            if not os.path.isdir(cache):
                why = "its cache is gone"
            elif private_nbytes(os.getpid()) > _MOST_NBYTES or free_nbytes() < _NEEDED_NBYTES // 2:
                why = "it took too much memory"
            if why:
                signal.pidfd_send_signal(ended.fileno(), signal.SIGKILL)
                break
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGALRM, -signal.SIGXCPU):
        return "it took too long"
    return why or (f"the judge ended with {code}" if code else "")


def _import_libraries() -> None:
    from shmload._host.collector import freeze_imports, paused_gc

    with paused_gc():
        import shmload._building.examining  # noqa: F401
        from shmload._building.rules import import_libraries

        import_libraries()
        freeze_imports()
