"""Times the steps of a copy of weights in memory to a GPU, for some sizes in GB.

    .venv/bin/python scripts/upload_steps.py [--pretend] [SIZE]...       # 4.5 and 20

The weights are bfloat16 matrices of 38 MB, with a bias each, over a file in memory that is mapped
as a segment is. Each size is copied twice; the second time is that of a process that has copied
before. With --pretend no GPU is needed: copies to it take no time, so the steps tell how fast the
cores fill the slots.
"""

import argparse
import gc
import json
import mmap
import os
import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from benchmarks.pretended import Pretended
from torch import nn

from shmload._devices.moves import Moves
from shmload._devices.upload import Upload, bring
from shmload._host.descriptors import inode_of
from shmload._runtimes.kinds import runtime_of
from shmload._runtimes.runtime import Runtime

_WIDTH = 4352
_MATRIX_NBYTES = _WIDTH * _WIDTH * 2
_BLOCK_NBYTES = _MATRIX_NBYTES + _WIDTH * 2


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--pretend", action="store_true")
    parser.add_argument("sizes", nargs="*", type=float, default=[4.5, 20])
    asked = parser.parse_args()
    if asked.pretend:
        runtime: Runtime = Pretended(copies=False)
    else:
        runtime = runtime_of(torch.device("cuda:0"))
    for size in asked.sizes:
        file = _filled(round(size * 1e9 / _BLOCK_NBYTES))
        for _ in range(2):
            print(json.dumps({"GB": size} | _measure(file, runtime)), flush=True)
        os.close(file)


def _filled(blocks: int) -> int:
    """Return a file in memory with the bytes of so many blocks."""
    file = os.memfd_create("weights")
    content = torch.randn(_BLOCK_NBYTES // 2 // 16 * 16, dtype=torch.bfloat16)
    block = content.view(torch.uint8).numpy().tobytes().ljust(_BLOCK_NBYTES, b"\0")
    for number in range(blocks):
        os.pwrite(file, block, number * _BLOCK_NBYTES)
    return file


def _module_over(file: int) -> nn.Module:
    content = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(content, dtype=torch.bfloat16)
    module = nn.ModuleList()
    for block in flat.split(_BLOCK_NBYTES // 2):
        with torch.device("meta"):
            layer = nn.Linear(_WIDTH, _WIDTH)
        layer.weight = nn.Parameter(block[: _WIDTH * _WIDTH].view(_WIDTH, _WIDTH), False)
        layer.bias = nn.Parameter(block[_WIDTH * _WIDTH :], False)
        module.append(layer)
    return module


def _measure(file: int, runtime: Runtime) -> dict[str, object]:
    """Copy once; return when each step was over, in ms, and the rates of the loop and the call."""
    module = _module_over(file)
    nbytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    reached: dict[str, float] = {}
    undo = [
        _noting(Moves, "__init__", "moves", reached),
        _noting(Upload, "__init__", "slots asked for", reached),
        _noting(Upload, "_take", "first slot locked", reached, is_first=True),
        _noting(Upload, "copy", "last fill", reached),
        _noting(Upload, "close", "close", reached),
        _noting(Moves, "commit", "commit", reached),
        _noting(type(runtime), "drain", "drain", reached),
    ]
    began = time.perf_counter()
    try:
        moves = Moves([(module, lambda path: runtime)])
        bring(moves, files=[(inode_of(os.fstat(file)), file)])
        moves.commit()
        call_s = time.perf_counter() - began
    finally:
        for each in undo:
            each()
    loop_s = reached["drain"] - reached["first slot locked"]
    steps = {
        name: round((at - began) * 1e3, 1)
        for name, at in sorted(reached.items(), key=itemgetter(1))
    }
    del module
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "steps, ms": steps,
        "call, ms": round(call_s * 1e3, 1),
        "loop, GB/s": round(nbytes / loop_s / 1e9, 1),
        "call, GB/s": round(nbytes / call_s / 1e9, 1),
    }


def _noting(
    owner: type, name: str, step: str, reached: dict[str, float], *, is_first: bool = False
) -> Callable[[], None]:
    """Note when a method returns, the first or the last time; returns what undoes that."""
    method = getattr(owner, name)

    def note(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if not (is_first and step in reached):
            reached[step] = time.perf_counter()
        return result

    setattr(owner, name, note)
    return lambda: setattr(owner, name, method)


if __name__ == "__main__":
    main()
