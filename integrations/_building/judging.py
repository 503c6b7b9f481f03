"""The judge: a process that makes skeletons, or finds out why models can have none.

For each request it forks, so that no request sees what an earlier one has left:

    judge ─ imports the libraries
      └ examiner ─ one request; a deadline
          ├ builds twice, traced, and compares with what a skeleton gives ─▶ the skeleton
          ├ builds twice                    ─▶ what that leaves ┐ are they the same?
          └ builds twice from the skeleton  ─▶ what that leaves ┘

It reads no weights: models are built over stand-ins. It writes to the folder of skeletons alone.
"""

import contextlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from shmload._host.forks import limit_inherited_threads
from shmload._host.linux import die_with_parent
from shmload._segments.view import remove_dead_views
from shmload._wording import logger_of
from shmload.integrations._building.requests import (
    Request,
    judging,
    oldest_request,
    read_request,
    requests_folder,
)

logger = logger_of(__name__)

_T = TypeVar("_T")
# The whole of one request, on a machine that has other work.
_DEADLINE_S = 300
_NICENESS = 19


def main() -> None:
    """Work off all requests, and return."""
    _make_way()
    folder = requests_folder()
    # Once more after the lock is free: a load that found it taken relies on this process.
    while oldest_request(folder):
        with judging(folder) as is_mine:
            if not is_mine:
                return
            _import_libraries()
            while path := oldest_request(folder):
                judge(path)


def judge(path: Path) -> None:
    """Work off one request, in a child; its file goes first, so that it is tried once."""
    try:
        request = read_request(path)
    except (OSError, msgspec.DecodeError) as exc:
        logger.info("a request cannot be read: %s", exc)
        return
    finally:
        path.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _end_with(lambda: _examine_within(request))
    _, status = os.waitpid(child, 0)
    if status:
        remove_dead_views()  # its own
        from shmload.integrations._building import skeletons

        code = os.waitstatus_to_exitcode(status)
        why = "it took too long" if code == -signal.SIGALRM else f"the judge ended with {code}"
        skeletons.skeleton_memo(request.key).write(refused(request, why, is_final=False))


def _examine_within(request: Request) -> None:
    """Judge one request before the deadline, and write the result."""
    signal.alarm(_DEADLINE_S)
    os.chdir(request.directory)
    from shmload.integrations._building import skeletons

    made = examine(request)
    skeletons.skeleton_memo(request.key).write(made)


def refused(request: Request, reason: str, *, is_final: bool = True) -> Any:
    """Return the skeleton of models that get none."""
    from shmload.integrations._building.skeletons import Skeleton

    return Skeleton(
        source=request.given,
        root=request.root,
        class_name=request.class_name or request.wanted or "",
        dtype=str(request.torch_dtype),
        reason=reason,
        is_final=is_final,
    )


def examine(request: Request) -> Any:
    """Return the skeleton that a request asks for, or one that says why there is none."""
    from shmload.integrations._building.examining import Examination, Refused
    from shmload.integrations._building.proofs import recall_proof, remember_proof

    try:
        with Examination(request) as examination:
            memo = examination.proof_memo
            if proof := recall_proof(memo):
                derived = in_child(lambda: examination.derive(proof))
                if derived:
                    return derived
            made, used = in_child(examination.make)
            made, used = in_child(lambda: examination.prove(made, used, in_child))
            if not (used.reason and proof):  # what is proved stays proved for other dtypes
                remember_proof(memo, used)
            return refused(request, used.reason) if used.reason else made
    except Refused as exc:
        return refused(request, str(exc))


def in_child(function: Callable[[], _T]) -> _T:
    """Call a function in a forked child, and return what it returned.

    Raises:
        Refused: the child raised it.
        RuntimeError: the child failed otherwise.
    """
    import pickle

    from shmload.integrations._building.examining import Refused

    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            _end_with(lambda: _answer(function, file.fileno()))
        _, status = os.waitpid(child, 0)
        file.seek(0)
        content = file.read()
    if status or not content:
        raise RuntimeError(f"a child ended with {os.waitstatus_to_exitcode(status)}")
    # From the own child, in a file that has no name.
    answer = pickle.loads(content)
    if isinstance(answer, str):
        raise Refused(answer)
    result: _T = answer[0]
    return result


def _answer(function: Callable[[], object], fd: int) -> None:
    import pickle

    from shmload.integrations._building.examining import Refused

    signal.alarm(_DEADLINE_S)
    limit_inherited_threads()
    try:
        answer: object = (function(),)
    except Refused as exc:
        answer = str(exc)
    with open(fd, "wb", closefd=False) as file:
        file.write(pickle.dumps(answer))


def _end_with(function: Callable[[], None]) -> NoReturn:
    """Call a function and end this process, without the end that an interpreter has."""
    code = 1
    try:
        die_with_parent()
        function()
        code = 0
    except BaseException:
        if os.environ.get("SHMLOAD_JUDGE_TRACEBACK"):
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _make_way() -> None:
    """Let everything else on the machine go first; be the first to end where memory lacks."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _import_libraries() -> None:
    from shmload._host.collector import freeze_imports, paused_gc

    with paused_gc():
        import shmload.integrations._building.examining  # noqa: F401
        from shmload.integrations._building.rules import import_libraries

        import_libraries()
        freeze_imports()
