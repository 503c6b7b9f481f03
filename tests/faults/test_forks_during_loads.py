"""A child that is forked while other threads load holds nothing of what they hold, and loads."""

import gc
import os
import threading

import pytest

import shmload
from shmload._checkpoints.library import libraries_lock
from shmload._host.collector import paused_gc

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


@pytest.mark.libraries
def test_child_that_is_forked_during_a_build_loads(saved, evicts):
    source = saved("stable-diffusion")
    shmload.load_model("AutoencoderKL", source, subfolder="vae", keep=True)
    with Holding(libraries_lock), Holding(paused_gc()):
        assert not gc.isenabled()
        loaded = in_child(
            lambda: [shmload.load_model("AutoencoderKL", source, subfolder="vae"), gc.isenabled()]
        )
    assert loaded.startswith("[AutoencoderKL")
    assert loaded.endswith(" True]")
    assert gc.isenabled()
