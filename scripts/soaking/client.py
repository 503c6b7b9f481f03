"""A client process: runs each operation it reads from stdin and answers with one line.

It keeps its last load, and so the leases, until the next load or the order to drop it.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from proc import open_files
from safetensors.torch import load_file

import shmload
from soaking.sources import digest_tensors

Answer = dict[str, Any]
_held: dict[str, torch.Tensor] = {}


def load(path: str, dtype: str | None, *, keep: bool, verify: bool) -> Answer:
    _held.clear()
    _held.update(
        shmload.load_state_dict(path, dtype, keep=keep, verify=verify, workers=2, progress=False)
    )
    return {"tensors": digest_tensors(_held)}


def warm(path: str, dtype: str | None, *, verify: bool) -> Answer:
    report = shmload.warm(path, dtype=dtype, verify=verify, workers=2, progress=False)
    return {"read_nbytes": report.read_nbytes}


def view(path: str, dtype: str | None, *, keep: bool) -> Answer:
    _held.clear()
    with shmload.view(path, dtype=dtype, keep=keep, workers=2, progress=False) as lent:
        for file in sorted(lent.glob("*.safetensors")) if lent.is_dir() else [lent]:
            _held.update(load_file(file))
    return {"tensors": digest_tensors(_held)}


def check() -> Answer:
    """Check that the loaded tensors have not changed, even if their source or segments did."""
    return {"tensors": digest_tensors(_held)}


def evict(path: str) -> Answer:
    return {"segments": [info.name for info in shmload.evict(path)]}


def verify() -> Answer:
    return {"segments": [info.name for info in shmload.verify()]}


def collect() -> Answer:
    return {"segments": shmload.collect_garbage()}


def leftovers() -> Answer:
    """Drop everything; return the descriptors, mappings and threads that are left."""
    _held.clear()
    gc.collect()
    ours = ("/dev/shm/", "/memfd:", "socket:", "anon_inode:[pidfd]")
    held = [f for f in open_files("self") if f.startswith(ours) or ".safetensors" in f]
    mapped = [
        line for line in Path("/proc/self/maps").read_text().split("\n") if "/dev/shm/" in line
    ]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("shmload")]
    return {"left": [*held, *mapped, *threads]}


OPERATIONS: dict[str, Callable[..., Answer]] = {
    do.__name__: do for do in (load, warm, view, check, evict, verify, collect, leftovers)
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries' prints go to stderr, not among the answers
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answers.write("{}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.monotonic()
        try:
            answer = OPERATIONS[asked.pop("do")](**asked)
        except Exception as exc:  # the judge decides whether this error is allowed
            answer = {
                "errors": [kind.__name__ for kind in type(exc).__mro__],
                "message": str(exc),
                "traceback": traceback.format_exc(),
            }
        answers.write(json.dumps(answer | {"took_s": time.monotonic() - began}) + "\n")


if __name__ == "__main__":
    main()
