"""The judge as a process: one for all programs of a user, with bounds, that ends with its cache."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from shmload._building import judging, limited, queued
from shmload._building.queued import Program, Work
from shmload._building.skeletons import Skeleton, skeleton_memo
from shmload._host.descriptors import Lock, wait_lock
from shmload._host.idleness import Load, give_way
from shmload._segments.view import View
from shmload._settings import settings

pytestmark = pytest.mark.slow

_DEADLINE_S = 30.0
# Stands for the judge: says that it was started, and holds the lock until the pipe has a writer.
_WAITS = """
import os, sys
place = os.environ["XDG_RUNTIME_DIR"]
with open(f"{place}/started", "a") as file:
    file.write("once\\n")
open(f"{place}/pipe").read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A queue of this test's own, and a judge that only waits."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(queued, "_PROGRAM", _WAITS)
    os.mkfifo(tmp_path / "pipe")
    yield queued.queue()
    end_judge(tmp_path)


def end_judge(tmp_path):
    path = queued.queue().lock_path
    lock = Lock.try_take(path)
    if lock is None:  # it is there, and comes to the pipe
        with open(tmp_path / "pipe", "w"):
            pass
        with open(path, "r+") as file:
            assert wait_lock(file.fileno(), exclusive=True, timeout_s=_DEADLINE_S)
    else:
        lock.close()


def work_for(cache, key="one"):
    cache.mkdir(exist_ok=True)
    program = Program.of_this_process()
    return Work(key=key, cache=str(cache), program=program, request=b"")


_ASK = """
import sys
from pathlib import Path
from shmload._building import queued
queued._PROGRAM = sys.argv[2]
cache = Path(sys.argv[1])
cache.mkdir()
work = queued.Work(
    key="one",
    cache=str(cache),
    program=queued.Program.of_this_process(),
    request=b"",
)
print("READY", flush=True)
sys.stdin.readline()
queued.leave(work)
print("ASKED", flush=True)
"""


def test_many_programs_with_caches_of_their_own_start_one_judge(place, child, tmp_path):
    programs = [child(_ASK, tmp_path / str(number), _WAITS) for number in range(12)]
    for each in programs:
        each.expect("READY")
    for each in programs:
        each.say()
    for each in programs:
        each.expect("ASKED")
    end_judge(tmp_path)  # it has written its line by then
    assert (tmp_path / "started").read_text() == "once\n"
    assert len(list(place.waiting())) == 12


def test_lock_is_never_free_between_the_program_and_its_judge(place, tmp_path, monkeypatch):
    seen = []

    def look(*args, **kwargs):
        seen.append(Lock.try_take(place.lock_path))
        done = run(*args, **kwargs)
        seen.append(Lock.try_take(place.lock_path))
        return done

    run = subprocess.run
    monkeypatch.setattr(queued.subprocess, "run", look)
    queued.leave(work_for(tmp_path / "cache"))
    seen.append(Lock.try_take(place.lock_path))
    queued.leave(work_for(tmp_path / "cache", "two"))
    assert seen == [None] * 3


# The process itself -------------------------------------------------------------------------------


@pytest.fixture
def judge(place, monkeypatch):
    """Return a judge on an idle machine, which is this process, without the libraries."""
    monkeypatch.setattr(judging, "observe", lambda seconds: Load(2, 0.0, 64 << 30))
    monkeypatch.setattr(judging, "_import_libraries", lambda: None)
    monkeypatch.setattr(judging, "_STAY_S", 0.0)
    monkeypatch.setattr(judging, "_MOST_CPU_S", math.inf)  # other tests have used some, too
    monkeypatch.setattr(judging, "_WATCH_S", 0.02)

    def make(work):
        judging.use_cache(work)
        (settings().cache_dir / f"{work.key}.done").write_text("")

    monkeypatch.setattr(judging, "make", make)
    with Lock.try_take(place.lock_path) as lock:
        yield judging.Judge(place, lock, Program.of_this_process())


@pytest.fixture
def given_up(monkeypatch):
    """Key of the work that was given up, and why."""
    noted = []
    monkeypatch.setattr(judging, "in_child", lambda note: note())
    monkeypatch.setattr(judging, "note", lambda work, why: noted.append((work.key, why)))
    return noted


def test_all_work_is_done_for_each_cache(place, judge, tmp_path):
    for cache in ("one", "other"):
        for key in ("a", "b"):
            place.put(work_for(tmp_path / cache, key))
    judge.run()
    assert list(place.waiting()) == []
    for cache in ("one", "other"):
        assert sorted(path.name for path in (tmp_path / cache).iterdir()) == ["a.done", "b.done"]


def wait_long(work):
    time.sleep(600)


def test_judge_ends_with_its_cache_and_makes_none_anew(
    place, judge, given_up, tmp_path, shm_names, monkeypatch
):
    cache = tmp_path / "cache"

    def remove_and_wait(work):
        View(tmp_path, {}).__enter__()
        assert shm_names()
        shutil.rmtree(cache)
        wait_long(work)

    monkeypatch.setattr(judging, "make", remove_and_wait)
    place.put(work_for(cache))
    judge.run()
    assert given_up == [("one", "its cache is gone")]
    assert not cache.exists()
    assert list(place.waiting()) == []
    assert not shm_names()


def test_result_goes_to_no_cache_that_was_made_anew(place, tmp_path):
    cache = tmp_path / "cache"
    made = Skeleton(source="s", root="r", class_name="c", dtype="d")

    def write():
        judging.use_cache(work_for(cache))
        shutil.rmtree(cache)
        is_written = [skeleton_memo("one").write(made)]
        assert not cache.exists()
        cache.mkdir()
        return [*is_written, skeleton_memo("one").write(made)]

    assert limited.in_child(write) == [False, False]
    assert list(cache.iterdir()) == []


def test_examiner_that_takes_too_much_memory_is_killed(
    place, judge, given_up, tmp_path, monkeypatch
):
    monkeypatch.setattr(judging, "_MOST_NBYTES", 1)
    monkeypatch.setattr(judging, "make", wait_long)
    place.put(work_for(tmp_path / "cache"))
    judge.run()
    assert given_up == [("one", "it took too much memory")]


def use_a_core(work):
    while True:
        pass


def test_process_that_takes_too_much_processor_time_is_killed(monkeypatch):
    monkeypatch.setattr(limited, "_MOST_CPU_S", 1)
    with pytest.raises(RuntimeError, match=f"ended with -{signal.SIGXCPU.value}"):
        limited.in_child(lambda: use_a_core(None))


def test_examiner_that_takes_too_long_is_killed(place, judge, given_up, tmp_path, monkeypatch):
    monkeypatch.setattr(limited, "_DEADLINE_S", 1)
    monkeypatch.setattr(judging, "make", wait_long)
    place.put(work_for(tmp_path / "cache"))
    judge.run()
    assert given_up == [("one", "it took too long")]


def test_judge_that_has_used_its_processor_time_leaves_the_rest(
    place, judge, tmp_path, monkeypatch
):
    monkeypatch.setattr(judging, "_MOST_CPU_S", 0.0)
    for name in ("one", "other"):
        place.put(work_for(tmp_path / name))
    judge.run()
    assert len(list(place.waiting())) == 1


def test_judge_of_a_busy_machine_waits_and_leaves_the_work(place, judge, tmp_path, monkeypatch):
    looks = []

    def observe(seconds):
        looks.append(seconds)
        return Load(2, 2.0, 64 << 30)

    monkeypatch.setattr(judging, "observe", observe)
    monkeypatch.setattr(judging, "_WAIT_S", 0.0)
    monkeypatch.setattr(judging, "_import_libraries", lambda: pytest.fail("it has imported"))
    monkeypatch.setattr(judging.Judge, "_become", lambda *_: None)
    place.put(work_for(tmp_path / "cache"))
    judge.run()
    assert looks == [2.0]
    assert len(list(place.waiting())) == 1


def test_work_of_a_judge_that_was_killed_is_given_up(place, judge, given_up, tmp_path):
    place.put(work_for(tmp_path / "cache"))
    place.take(next(place.waiting())[0])
    place.put(work_for(tmp_path / "cache", "two"))
    judge.run()
    assert given_up == [("one", "the judge was killed")]
    assert place.taken() is None


def test_judge_gives_way_to_all_else_and_its_session_does_not():
    before = os.nice(0)

    def look():
        give_way()
        return os.sched_getscheduler(0), os.nice(0), os.getsid(0) == os.getpid()

    assert limited.in_child(look) == (os.SCHED_IDLE, min(19, before + 19), True)
    with contextlib.suppress(FileNotFoundError):  # a kernel without such groups
        assert "nice 19" not in Path("/proc/self/autogroup").read_text()
