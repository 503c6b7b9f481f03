"""A small checkpoint, its converted tensors, and a child that warms or loads it step by step."""

import os
import time
from pathlib import Path

import torch

import shmload

SHM = Path("/dev/shm")
TENSORS = {
    "a.weight": torch.randn(300, 40, generator=torch.Generator().manual_seed(0)),
    "b": torch.arange(77),
    "c": torch.tensor(1.5),
}
NBYTES = sum(tensor.nbytes for tensor in TENSORS.values())

# A child that warms or loads its sources. It prints each step, and at each progress report waits
# for a line on stdin.
CHILD = """
import logging, sys
import shmload
how, *sources = sys.argv[1:]
class Say(logging.Handler):
    def emit(self, record):
        if "awaited" in record.msg:
            print("BEGUN", record.getMessage(), flush=True)
logging.getLogger("shmload").addHandler(Say())
logging.getLogger("shmload").setLevel(logging.INFO)
def stop(done, total):
    print("AT", done, total, flush=True)
    sys.stdin.readline()
print("READY", flush=True)
for source in sources:
    if how == "race":
        sys.stdin.readline()
        report = shmload.warm(source, torch_dtype="bfloat16")
    elif how in ("stops", "waits"):  # of a rank
        given = {"progress": stop if how == "stops" else False}
        try:
            pipe = shmload.load_pipeline(source, torch_dtype="bfloat16", **given)
        except shmload.ShmloadError as exc:
            print("REFUSED", type(exc).__name__, exc, flush=True)
        else:
            print("LOADED", flush=True)
            sys.stdin.readline()
        continue
    elif how == "warm":
        report = shmload.warm(source, torch_dtype="bfloat16", progress=stop)
    else:
        state = shmload.load_state_dict(source, "bfloat16", progress=stop)
        print("LOADED", float(state["a.weight"].double().sum()), flush=True)
        sys.stdin.readline()
        continue
    print("READ", report.read_nbytes, *report.segments, flush=True)
"""


def idle_for(seconds):
    """Make all resident segments look as if they were last used so long ago."""
    for info in shmload.segments():
        then = time.time() - seconds
        os.utime(SHM / info.name, (then, then))


def begun(process):
    """Wait until a child builds its parts or has found their builder; return its log message."""
    process.expect("READY")
    return process.expect("BEGUN")


def as_bf16(tensors):
    return {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def assert_same(got, wanted):
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name
