"""Ctrl-C raises KeyboardInterrupt in the caller of a load, and nothing is left."""

import os
import signal
from itertools import product
from pathlib import Path

import pytest
from watching import Watched, until, workers_of

# Runs in a process group of its own, as a shell starts it; prints when its load is being ended.
LOADER = """
import os, sys, threading
os.setpgid(0, 0)
import shmload
from shmload._loading.load import Load
has_stopped = threading.Event()
end, wait = Load._end, Load.wait
def say_and_end(load, **how):
    if not load._cancelled.is_set():
        load._cancelled.set()
        print("CLOSING", flush=True)
    return end(load, **how)
def say_and_wait(load):
    has_stopped.wait()
    print("WAITING", flush=True)
    wait(load)
Load._end, Load.wait = say_and_end, say_and_wait
def stop(done, total):
    if not has_stopped.is_set():
        print("AT", flush=True)
        has_stopped.set()
        sys.stdin.readline()
        opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")]
        print("HAS", sum(path.endswith(".part") for path in opened), flush=True)
def view(source, **kwargs):
    with shmload.view(source, **kwargs):
        pass
def state_dict(source, torch_dtype, **kwargs):
    shmload.load_state_dict(source, torch_dtype, **kwargs)
doors = {"warm": shmload.warm, "view": view, "state_dict": state_dict}
doors["pipeline"] = shmload.load_pipeline
door, source = sys.argv[1:]
doors[door](source, torch_dtype="bfloat16", progress=stop)
"""


def wait_until_asleep(pid):
    """Wait until a process's main thread sleeps, here while it waits for the decoding thread."""
    stat = Path(f"/proc/{pid}/task/{pid}/stat")
    until(lambda: stat.read_text().rpartition(") ")[2][0] == "S")


def interrupt(process, times):
    """Send SIGINT to a process group, as a terminal does, and wait for its end."""
    process.expect("AT")
    workers = Watched(workers_of(process.pid))
    process.expect("WAITING")
    os.killpg(process.pid, signal.SIGINT)
    process.expect("CLOSING")
    for _ in range(times - 1):
        wait_until_asleep(process.pid)
        os.killpg(process.pid, signal.SIGINT)
    process.say()
    # The part stays open while the decoding thread runs: otherwise another file could get its
    # descriptor's number, and the thread would write there.
    assert int(process.expect("HAS")) > 0
    code = process.wait()
    workers.wait_for_the_end()
    assert "KeyboardInterrupt" in process.errors
    assert "Exception ignored" not in process.errors
    assert code == -signal.SIGINT
    return len(workers.pids)


@pytest.mark.parametrize(
    ("door", "workers", "times"),
    [
        *product(["warm", "view", "state_dict"], [0], [1, 2]),
        *product(["warm"], [2], [1, 2]),  # the workers are the same for each door
    ],
)
def test_interrupted_load_leaves_nothing(large, child, configure, shm_names, door, workers, times):
    configure(inline_nbytes=0 if workers else 1 << 30, workers=workers or 1)
    assert interrupt(child(LOADER, door, large), times) == workers
    assert shm_names() == []


def test_interrupted_pipeline_leaves_nothing(saved, child, configure, shm_names):
    # Interrupt after the build, in the wait for weights: imports of the libraries catch any
    # exception.
    configure(inline_nbytes=0, workers=1)
    assert interrupt(child(LOADER, "pipeline", saved("flux")), 1) == 1
    assert shm_names() == []


CUT_SHORT = """
import sys
import shmload
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.autograd":
            raise KeyboardInterrupt
pipeline, checkpoint = sys.argv[1:]
sys.meta_path.insert(0, Interrupt())
def attempt(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except BaseException as exc:
        print("GOT", type(exc).__name__, "restart the process" in str(exc), flush=True)
    else:
        print("GOT nothing", flush=True)
attempt(shmload.load_pipeline, pipeline, dtype="bfloat16")
del sys.meta_path[0]
attempt(shmload.load_pipeline, pipeline, dtype="bfloat16")
attempt(shmload.warm, pipeline, dtype="bfloat16")
attempt(shmload.warm, checkpoint, dtype="bfloat16")
"""


@pytest.mark.libraries
def test_load_after_an_interrupted_import_says_to_restart(
    saved, checkpoint, new_child, configure, tmp_path, evicts
):
    configure(cache_dir=tmp_path / "no rules")
    process = new_child(CUT_SHORT, saved("flux"), checkpoint)
    assert process.expect("GOT") == "KeyboardInterrupt False"
    said = [process.expect("GOT") for _ in range(3)]
    # A file of weights has no class: it needs no library.
    assert said == ["LibraryError True"] * 2 + ["nothing"]
