"""A child that is forked while other threads load holds nothing of what they hold, and loads."""

import gc
import os
import threading

import pytest

import shmload
from shmload._checkpoints.library import libraries_lock
from shmload._host import changes
from shmload._host.collector import paused_gc
from shmload._segments.lease import Lease
from shmload._segments.segment import attach

_WAIT_S = 60


def in_child(check):
    """Return what a function returns in a forked child, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, str(check()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return said


class Holding:
    """A context held by another thread while the block runs."""

    def __init__(self, hold):
        self._hold = hold
        self._is_held, self._is_over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        assert self._is_held.wait(_WAIT_S)

    def __exit__(self, *exc_info):
        self._is_over.set()
        self._thread.join()

    def _run(self):
        with self._hold:
            self._is_held.set()
            self._is_over.wait()


def is_free(lock):
    """Tell whether another thread could take a lock now."""
    taken = []

    def take():
        taken.append(lock.acquire(blocking=False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


def test_child_has_the_collector_on_unless_its_own_thread_needs_it_off():
    with Holding(paused_gc()):
        assert not gc.isenabled()
        assert in_child(gc.isenabled) == "True"
        assert not gc.isenabled()
        with paused_gc():
            assert in_child(gc.isenabled) == "False"
    assert gc.isenabled()


def test_child_has_no_lock_of_another_thread():
    lock = changes.add_lock()
    for each in (lock, libraries_lock):
        with Holding(each):
            assert not is_free(each)
            assert in_child(lambda each=each: is_free(each)) == "True"
        with each:
            assert in_child(lambda each=each: is_free(each)) == "False"


def test_child_gives_up_a_lease_that_does_not_cross_forks(saved):
    with shmload.share(saved("flux"), torch_dtype="bfloat16", components=["vae"]):
        (info,) = shmload.segments()
        with attach(info.name) as segment:
            lease = Lease(segment, crosses_forks=False)  # as a rank that waits has it
        assert in_child(lease.open_again) == "None"
        again = lease.open_again()
        assert again is not None
        os.close(again)
        lease.close()


def test_fork_waits_for_a_block_of_another_thread_and_not_for_ever(monkeypatch):
    timeouts = []

    class Gate:
        def acquire(self, timeout):
            timeouts.append(timeout)
            return gate.acquire(timeout=0)

        def __getattr__(self, name):
            return getattr(gate, name)

    gate = changes._forking
    with Holding(changes.forks_wait()):
        monkeypatch.setattr(changes, "_forking", Gate())
        assert in_child(lambda: not gate._is_owned()) == "True"
        monkeypatch.undo()
    assert timeouts == [changes._FORK_TIMEOUT_S]
    assert in_child(lambda: gate.acquire(blocking=False)) == "True"


@pytest.mark.libraries
def test_child_that_is_forked_during_a_build_loads(saved, evicts):
    source = saved("stable-diffusion")
    shmload.load_model("AutoencoderKL", source, subfolder="vae", keep=True)
    with Holding(libraries_lock):
        loaded = in_child(
            lambda: type(shmload.load_model("AutoencoderKL", source, subfolder="vae")).__name__
        )
    assert loaded == "AutoencoderKL"
