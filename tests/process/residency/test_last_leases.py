"""Releasing the last lease of a shared segment removes it, in any process and at any time."""

import pytest

import shmload
from shmload._host.descriptors import try_lock
from shmload._segments import upkeep
from shmload._segments.removal import LISTING_S, give_back
from shmload._segments.segment import Segment, attach


@pytest.fixture
def source(saved):
    return saved("stable-diffusion")


@pytest.fixture
def handle(source):
    with shmload.share(source, torch_dtype="bfloat16", components=["vae"]) as shared:
        yield shared


def test_listing_that_outlives_the_last_lease_removes_the_segments(handle, shm_names, monkeypatch):
    read_metadata = Segment.read_metadata

    def close_and_read(segment):
        handle.close()
        return read_metadata(segment)

    monkeypatch.setattr(Segment, "read_metadata", close_and_read)
    assert shmload.segments() == []
    assert shm_names() == []


def test_verifying_that_outlives_the_last_lease_removes_the_segments(
    handle, shm_names, monkeypatch
):
    digest_data = upkeep.digest_data

    def close_and_digest(*args):
        handle.close()
        return digest_data(*args)

    monkeypatch.setattr(upkeep, "digest_data", close_and_digest)
    assert len(shmload.verify()) == 1
    assert shm_names() == []


# Processes ----------------------------------------------------------------------------------------

MULTIPROCESSING = """
import multiprocessing, signal, sys
import shmload
source, how = sys.argv[1:]
handle = shmload.share(source, torch_dtype="bfloat16", components=["vae"])
def use(handle, loaded):
    handle.load()
    if how == "at work":
        kept = shmload.view(f"{source}/vae", torch_dtype="bfloat16")
        kept.__enter__()
    loaded.set()
    signal.pause()
context = multiprocessing.get_context("fork")
loaded = context.Event()
process = context.Process(target=use, args=(handle, loaded), daemon=True)
process.start()
assert loaded.wait(60)
if how == "closed":
    handle.close()
print("USED", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("how", ["open", "closed", "at work"])
def test_process_whose_daemonic_children_end_with_it(source, child, shm_names, how):
    # If multiprocessing was imported first, it ends its children after all other exit handlers.
    process = child(MULTIPROCESSING, source, how)
    process.expect("USED")
    assert len(shm_names()) == (2 if how == "at work" else 1)
    process.say()
    assert process.wait() == 0
    assert shm_names() == []


EXIT = """
import atexit, sys, time
sleep, waits = time.sleep, []
def wait(seconds):
    waits.append(seconds)
    sleep(seconds)
atexit.register(lambda: print("WAITED", sum(waits), flush=True))
import shmload
handle = shmload.share(sys.argv[1], torch_dtype="bfloat16")
print("SHARED", flush=True)
sys.stdin.readline()
handle.close()
del handle
print("CLOSED", flush=True)
sys.stdin.readline()
time.sleep = wait
"""


def test_exit_waits_once_for_all_names_that_another_process_has_locked(source, child, shm_names):
    process = child(EXIT, source)
    process.expect("SHARED")
    held = [attach(name) for name in shm_names()]
    assert len(held) > 1
    process.say()
    process.expect("CLOSED")
    assert all(try_lock(segment.fd, exclusive=True) for segment in held)  # as an eviction does
    process.say()
    # Once more after multiprocessing has ended the children.
    assert 0 < float(process.expect("WAITED")) <= 2 * LISTING_S + 0.1
    assert process.wait() == 0
    give_back(*held)
    assert shm_names() == []
