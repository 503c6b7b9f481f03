"""Processes end or fork with live tensors or during a load without a crash or leftovers.

The code runs in a child; its exit code and stderr show a crash.
"""

import pytest
from forking_python import FINALIZES
from safetensors.torch import load_file, save_file
from warming import TENSORS

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
