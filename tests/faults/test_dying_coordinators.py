"""When a loader is killed its workers exit and its memory is freed; threads may start and end."""

import os
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from warming import CHILD, TENSORS, begun
from watching import Watched, users_of, workers_of

import shmload
from shmload._segments.part import Awaited, acquire


@pytest.mark.parametrize("how", ["warm", "load"])
def test_workers_leave_a_killed_loader_and_its_part_is_garbage(
    large, child, configure, shm_names, how
):
    configure(inline_nbytes=0, workers=2)
    loader = child(CHILD, how, large)
    begun(loader)
    loader.expect("AT")
    workers = Watched(workers_of(loader.pid))
    assert len(workers.pids) == 2
    (part,) = shm_names()
    assert users_of(part) <= {loader.pid, *workers.pids}
    loader.end()
    workers.wait_for_the_end()
    assert users_of(part) == set()
    assert shmload.segments() == []
    assert shmload.collect_garbage() == [part]
    assert shm_names() == []


def test_memory_of_a_killed_process_goes_with_it(tmp_path, child, shm_names):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    holder = child(CHILD, "load", path)
    begun(holder)
    holder.expect("AT")
    (part,) = shm_names()
    holder.say()
    holder.expect("LOADED")
    assert shm_names() == []
    assert users_of(part) == {holder.pid}
    holder.end()
    assert users_of(part) == set()


def test_part_that_is_taken_over_counts_as_progress(large, evicts, monkeypatch):
    (planned,) = shmload.plan(large, torch_dtype="bfloat16", keep=True).shards
    part = acquire(planned.segment)
    wait, seen = Awaited.wait, []
    # Its builder gives it up once the load waits.
    monkeypatch.setattr(Awaited, "wait", lambda *args: part.close() or wait(*args))
    shmload.warm(large, torch_dtype="bfloat16", progress=lambda *numbers: seen.append(numbers))
    assert seen[-1] == (planned.read_nbytes, planned.read_nbytes)


# Forks a child that inherits all descriptors: the workers' sockets, but not the part's lock.
FORKER = """
import os, signal, sys
import shmload
def fork_and_stop(done, total):
    sleeper = os.fork()
    if sleeper == 0:
        while True:
            signal.pause()
    print("FORKED", sleeper, flush=True)
    sys.stdin.readline()
shmload.warm(sys.argv[1], torch_dtype="bfloat16", progress=fork_and_stop)
"""


def test_workers_leave_a_killed_loader_whose_forked_child_has_their_sockets(
    large, child, configure, shm_names
):
    configure(inline_nbytes=0, workers=2, wait_timeout_s=0.2)
    loader = child(FORKER, large)
    sleeper = int(loader.expect("FORKED"))
    try:
        workers = Watched(workers_of(loader.pid))
        assert len(workers.pids) == 2
        (part,) = shm_names()
        loader.end()
        workers.wait_for_the_end()
        # The child has left the lock to its parent, so the part is garbage.
        assert users_of(part) == set()
        assert shmload.collect_garbage() == [part]
    finally:
        watched = Watched([sleeper])
        os.kill(sleeper, signal.SIGKILL)
        watched.wait_for_the_end()
    assert shm_names() == []


# Threads ------------------------------------------------------------------------------------------


def run_in_a_thread(action):
    """Run a function in a thread, join the thread, and return the result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    thread.join()
    return results[0]


def test_tensors_outlive_the_thread_that_loaded_them(checkpoint, configure):
    configure(inline_nbytes=0, workers=1)
    got = run_in_a_thread(lambda: shmload.load_state_dict(checkpoint, torch.bfloat16))
    assert torch.equal(got["a"], load_file(checkpoint)["a"].bfloat16())


def test_thread_that_cannot_be_started_leaves_nothing(checkpoint, monkeypatch, shm_names):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            shmload.load_state_dict(checkpoint, torch.bfloat16)
    assert shm_names() == []
    assert len(shmload.load_state_dict(checkpoint, torch.bfloat16)) == 2
