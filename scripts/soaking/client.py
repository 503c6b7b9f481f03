"""A client: `client.py`, which does what the lines on its stdin say and answers each with a line.

It holds what it loaded until it loads again or is told to drop it, and so has leases.
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
from safetensors.torch import load_file

import shmload
from soaking.digests import digest_tensors

Answer = dict[str, Any]
_held: dict[str, torch.Tensor] = {}


def load(path: str, dtype: str | None, *, keep: bool, verify: bool) -> Answer:
    _held.clear()
    _held.update(
        shmload.load_state_dict(path, dtype, keep=keep, verify=verify, workers=2, progress=False)
    )
    return {"tensors": digest_tensors(_held)}


def warm(path: str, dtype: str | None, *, verify: bool) -> Answer:
    report = shmload.warm(path, torch_dtype=dtype, verify=verify, workers=2, progress=False)
    return {"read_nbytes": report.read_nbytes}


def view(path: str, dtype: str | None, *, keep: bool) -> Answer:
    _held.clear()
    with shmload.view(path, torch_dtype=dtype, keep=keep, workers=2, progress=False) as lent:
        for file in sorted(lent.glob("*.safetensors")) if lent.is_dir() else [lent]:
            _held.update(load_file(file))
    return {"tensors": digest_tensors(_held)}


def check() -> Answer:
    """What is held must not have changed, whatever became of its source and segments."""
    return {"tensors": digest_tensors(_held)}


def evict(path: str) -> Answer:
    return {"segments": [info.name for info in shmload.evict(path)]}


def verify() -> Answer:
    return {"segments": [info.name for info in shmload.verify()]}


def collect() -> Answer:
    return {"segments": shmload.collect_garbage()}


def leftovers() -> Answer:
    """Drop everything and say what is still open."""
    _held.clear()
    gc.collect()
    open_files = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the listing's own
            continue
        ours = ("/dev/shm/", "/memfd:", "socket:", "anon_inode:[pidfd]")
        if target.startswith(ours) or ".safetensors" in target:
            open_files.append(target)
    mapped = [
        line for line in Path("/proc/self/maps").read_text().split("\n") if "/dev/shm/" in line
    ]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("shmload")]
    return {"left": [*open_files, *mapped, *threads]}


OPERATIONS: dict[str, Callable[..., Answer]] = {
    do.__name__: do for do in (load, warm, view, check, evict, verify, collect, leftovers)
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not get among the answers
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answers.write("{}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.monotonic()
        try:
            answer = OPERATIONS[asked.pop("do")](**asked)
        except Exception as exc:  # the outermost loop: the judge says whether it may be
            answer = {
                "errors": [kind.__name__ for kind in type(exc).__mro__],
                "message": str(exc),
                "traceback": traceback.format_exc(),
            }
        answers.write(json.dumps(answer | {"took_s": time.monotonic() - began}) + "\n")


if __name__ == "__main__":
    main()
