"""Processes end or fork with live tensors or during a load without a crash or leftovers.

The code runs in a child; its exit code and stderr show a crash.
"""

import os

import pytest
from forking_python import FINALIZES
from safetensors.torch import load_file, save_file
from warming import TENSORS
from watching import Watched, workers_of

import shmload

# The ways to get tensors over a segment, or over the file itself.
KINDS = {
    "private": "shmload.load_state_dict(source, 'bfloat16')",
    "resident": "shmload.load_state_dict(source, 'bfloat16', keep=True)",
    "file": "shmload.load_state_dict(source)",
    "view": "load_view(source)",
}
HOLDER = """
import gc, os, signal, sys
import safetensors.torch, torch
import shmload
source, expression = sys.argv[1:]
def load_view(source):
    with shmload.view(source, torch_dtype="bfloat16") as path:
        return safetensors.torch.load_file(path)
def total(state):
    return sum(tensor.double().sum().item() for tensor in state.values())
"""
LOAD = HOLDER + "state = eval(expression)\n"


@pytest.fixture(autouse=True)
def _finalizers(monkeypatch):
    monkeypatch.setenv(FINALIZES, "1")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


def total(source, kind):
    tensors = load_file(source).values()
    if kind != "file":
        tensors = [t.bfloat16() if t.is_floating_point() else t for t in tensors]
    return sum(tensor.double().sum().item() for tensor in tensors)


def assert_quiet_end(process):
    assert process.wait() == 0, process.errors
    assert process.errors == ""


# Ends ---------------------------------------------------------------------------------------------


# Tensors in a module, in a cycle, and in an object whose finalizer reads them.
END = """
class Last:
    def __del__(self):
        print("LAST", total(self.state), flush=True)
last = Last()
last.state, last.cycle = state, last
torch.kept = list(state.values())
"""


@pytest.mark.parametrize("kind", KINDS)
def test_process_ends_with_tensors_alive(source, child, evicts, shm_names, kind):
    assert_quiet_end(child(LOAD + END, source, KINDS[kind]))
    assert len(shm_names()) == (kind == "resident")
    assert not any(info.is_leased for info in shmload.segments())


PIPELINE = """
import sys
import shmload
source, keep = sys.argv[1:]
pipe = shmload.load_pipeline(source, torch_dtype="bfloat16", keep=keep == "True")
print("LOADED", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_process_ends_with_a_pipeline_alive(saved, child, new_child, evicts, shm_names, keep):
    start = new_child if keep else child  # with shmload imported first, and after the libraries
    process = start(PIPELINE, saved("flux"), keep)
    process.expect("LOADED")
    assert process.wait() == 0
    assert "Traceback" not in process.errors
    assert bool(shm_names()) == keep
    assert not any(info.is_leased for info in shmload.segments())


LOAD_ASIDE = """
import os, sys, threading
import shmload
def stop(done, total):
    os.write(1, b"AT\\n")  # print holds a lock a moment longer, which the end of Python wants
    threading.Event().wait()
def load():
    shmload.load_state_dict(sys.argv[1], "bfloat16", progress=stop)
threading.Thread(target=load, daemon=True).start()
sys.stdin.readline()
"""


@pytest.mark.parametrize("inline_nbytes", [0, 1 << 30], ids=["worker", "inline"])
def test_process_ends_while_a_daemon_thread_loads(
    large, child, configure, shm_names, inline_nbytes
):
    configure(inline_nbytes=inline_nbytes, workers=1)
    process = child(LOAD_ASIDE, large)
    process.expect("AT")
    workers = Watched(workers_of(process.pid))
    process.say()
    assert_quiet_end(process)
    workers.wait_for_the_end()
    # Python does not join a daemon thread, so this end is like a kill.
    (part,) = shm_names()
    assert shmload.collect_garbage() == [part]
    assert shm_names() == []


# Forks --------------------------------------------------------------------------------------------


FORK = """
print("TOTAL", total(state), flush=True)
if os.fork() == 0:
    found = total(state)
    state["a.weight"].fill_(7)  # private to each of the two
    print("FORKED", os.getpid(), found, flush=True)
    sys.stdin.readline()
    del state
    gc.collect()
    sys.exit()  # as processes usually end, with all finalizers
"""
USE_AFTER_FORK = """
print("ENDED", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
sys.stdin.readline()
print("STILL", total(state), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_forked_child_uses_the_tensors_and_its_end_does_not_disturb_the_parent(
    source, child, evicts, kind
):
    process = child(LOAD + FORK + USE_AFTER_FORK, source, KINDS[kind])
    wanted = total(source, kind)
    assert float(process.expect("TOTAL")) == wanted
    assert float(process.expect("FORKED").split()[1]) == wanted
    process.say()
    assert process.expect("ENDED") == "0"
    # Both processes share the lock, and the child has closed only its own descriptors.
    for info in shmload.segments():
        assert info.is_leased
        with pytest.raises(shmload.SegmentBusy):
            shmload.evict(info.name)
    process.say()
    assert float(process.expect("STILL")) == wanted
    assert_quiet_end(process)
    assert not any(info.is_leased for info in shmload.segments())


def test_forked_child_keeps_the_lease_of_its_dead_parent(source, child, evicts):
    process = child(LOAD + FORK + "signal.pause()", source, KINDS["resident"])
    process.expect("TOTAL")
    forked = Watched([int(process.expect("FORKED").split()[0])])
    process.process.kill()
    process.wait()
    (info,) = shmload.segments()
    assert info.is_leased
    process.say()  # to the forked child, which has the same stdin
    forked.wait_for_the_end()
    assert not shmload.segments()[0].is_leased
    assert [removed.name for removed in shmload.evict(info.name)] == [info.name]


FORK_AND_LOAD = """
if os.fork() == 0:
    print("AGAIN", total(eval(expression)), flush=True)
    sys.exit()
print("ENDED", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("inline_nbytes", [0, 1 << 30], ids=["worker", "inline"])
def test_forked_child_loads_by_itself(source, child, configure, shm_names, inline_nbytes):
    configure(inline_nbytes=inline_nbytes, workers=1)
    process = child(LOAD + FORK_AND_LOAD, source, KINDS["private"])
    assert float(process.expect("AGAIN")) == total(source, "private")
    assert process.expect("ENDED") == "0"
    assert_quiet_end(process)
    assert shm_names() == []


FORK_WITH_THREADS = """
import faulthandler, os, sys
import torch
import shmload
source, is_loaded = sys.argv[1:]
handle = shmload.share(source, torch_dtype="bfloat16", components=["vae"])
large = torch.ones(1 << 20)
torch.set_num_threads(4)
large.exp().sum()  # on all four, which wait for more now
if is_loaded == "True":
    handle.load()
if os.fork() == 0:
    faulthandler.dump_traceback_later(50, exit=True)
    vae = handle.load().vae
    print("TOTAL", float(large.sum()), torch.get_num_threads(), flush=True)
    vae.encode(torch.ones(1, 3, 64, 64, dtype=torch.bfloat16))
    print("ENCODED", flush=True)
    sys.stdin.readline()
    os._exit(0)
os.wait()
print("PARENT", torch.get_num_threads(), flush=True)
"""


@pytest.mark.parametrize("is_loaded", [False, True])
def test_forked_child_waits_for_no_threads_of_its_parent(saved, child, shm_names, is_loaded):
    process = child(FORK_WITH_THREADS, saved("stable-diffusion"), is_loaded)
    assert process.expect("TOTAL") == f"{float(1 << 20)} 1"
    process.expect("ENCODED")
    process.say()
    assert process.expect("PARENT") == "4"
    assert process.wait() == 0
    assert shm_names() == []


# Closed segments ----------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_process_that_becomes_another_user_gives_its_leases_back(saved, child, evicts):
    """As gunicorn's workers do, which load as root, fork, and give up their rights."""
    code = """
import gc, os, sys
import shmload
pipe = shmload.load_pipeline(sys.argv[1], keep=True, components=["vae"], progress=False)
def held():
    links = (os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd"))
    return [link for link in links if "/dev/shm/shmload-" in link]
pid = os.fork()
if pid == 0:
    assert held()
    os.setgid(65534)
    os.setuid(65534)
    del pipe
    gc.collect()
    print("HELD", held(), flush=True)
    sys.exit()
assert os.waitpid(pid, 0)[1] == 0
"""
    process = child(code, saved("stable-diffusion"))
    assert process.expect("HELD") == "[]"
    assert process.wait() == 0, process.errors
    assert "PermissionError" not in process.errors
