"""A client process: runs each operation it reads from stdin and answers with one line.

It keeps its last load, and so the leases, until the next load or the order to drop it.
"""

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import shmload
from soaking.sources import digest_tensors

Answer = dict[str, Any]
_held: dict[str, torch.Tensor] = {}


def load(path: str, dtype: str | None, *, keep: bool, verify: bool) -> Answer:
    _held.clear()
    _held.update(
        shmload.load_state_dict(path, dtype, keep=keep, verify=verify, workers=2, progress=False)
    )
    return check()


def warm(path: str, dtype: str | None, *, verify: bool) -> Answer:
    shmload.warm(path, dtype=dtype, verify=verify, workers=2, progress=False)
    return {}


def check() -> Answer:
    """Tell what the tensors hold, which never changes, even if their source or segments do."""
    return {"tensors": digest_tensors(_held)}


def evict(path: str) -> Answer:
    shmload.collect_garbage()
    shmload.evict(path)
    return {}


def leave() -> Answer:
    """Drop everything; return the descriptors, mappings and threads that are left."""
    _held.clear()
    gc.collect()
    ours = ("/dev/shm/", "/memfd:", "socket:", "anon_inode:[pidfd]")
    held = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            held.append(os.readlink(f"/proc/self/fd/{number}"))
    held = [file for file in held if file.startswith(ours) or ".safetensors" in file]
    mapped = [
        line for line in Path("/proc/self/maps").read_text().split("\n") if "/dev/shm/" in line
    ]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("shmload")]
    return {"left": [*held, *mapped, *threads]}


_OPERATIONS: dict[str, Callable[..., Answer]] = {
    do.__name__: do for do in (load, warm, check, evict, leave)
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries' prints go to stderr, not among the answers
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    answers.write("{}\n")
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = _OPERATIONS[asked.pop("do")](**asked)
        except Exception as exc:  # the judge decides whether this error is allowed
            answer = {
                "errors": [kind.__name__ for kind in type(exc).__mro__],
                "traceback": traceback.format_exc(),
            }
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
