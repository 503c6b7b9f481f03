"""Probes that measure their own process, a fresh one each: `python probes.py NAME ARGUMENTS`.

Prints one line of JSON. Only the standard library is imported at the top: each probe decides what
is imported before its clock starts.
"""

import contextlib
import gc
import json
import mmap
import os
import select
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

_BLOCK_NBYTES = 1 << 20
_PAGE_NBYTES = 4096
_FLOOR_NBYTES = 1 << 30
_ONE_FILE = "model.safetensors"

Numbers = dict[str, float]


# Whole pipelines ----------------------------------------------------------------------------------


def attach(way: str, small: str, source: str) -> Numbers:
    """Load a pipeline in bfloat16 in a process that has loaded a small one before.

    Returns:
        `call_s` and `cpu_s` of the call; `touch_s` of reading a byte of each page of each weight
        after it; `private_nbytes`, the growth of the process's private memory over both; and
        `weights_nbytes`.
    """
    load = _loader(way)
    load(small)
    gc.collect()
    before = _private_nbytes()
    cpu_before = time.process_time()
    began = time.perf_counter()
    pipe = load(source)
    called = time.perf_counter()
    cpu_s = time.process_time() - cpu_before
    nbytes = _touch(pipe)
    touched = time.perf_counter()
    return {
        "call_s": called - began,
        "cpu_s": cpu_s,
        "touch_s": touched - called,
        "private_nbytes": _private_nbytes() - before,
        "weights_nbytes": nbytes,
    }


def repeat(way: str, source: str, count: int) -> Numbers:
    """Load a pipeline once, then `count` times: `call_s` is the median of the repeated loads."""
    load = _loader(way)
    load(source)
    return {"call_s": statistics.median(_time(partial(load, source)) for _ in range(count))}


def _loader(way: str) -> Callable[[str], Any]:
    """Return what loads a pipeline in bfloat16: of a directory, or of one file with a `config`."""
    import torch
    from diffusers import DiffusionPipeline, StableDiffusionXLPipeline

    import shmload

    def load(source: str) -> Any:
        config, file = os.path.join(source, "config"), os.path.join(source, _ONE_FILE)
        is_file = os.path.isdir(config)
        if way == "shmload":
            given = {"config": config} if is_file else {}
            return shmload.load_pipeline(file if is_file else source, dtype=torch.bfloat16, **given)
        if is_file:
            return StableDiffusionXLPipeline.from_single_file(
                file, config=config, torch_dtype=torch.bfloat16
            )
        return DiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)

    return load


def _touch(pipe: Any) -> int:  # diffusers has no types
    """Read one byte of every page of every weight; return the weights' size in bytes."""
    import torch

    nbytes = 0
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            for tensor in component.state_dict().values():
                flat = tensor.reshape(-1).view(torch.uint8)
                flat[::_PAGE_NBYTES].sum()
                nbytes += flat.numel()
    return nbytes


def _private_nbytes() -> int:
    """Return this process's private memory in bytes: anonymous pages and page tables.

    Private_Dirty would be wrong: it counts a page of a shared segment as private while only this
    process maps it.
    """
    rollup = Path("/proc/self/smaps_rollup").read_text()
    status = Path("/proc/self/status").read_text()
    return _kib(rollup, "Anonymous:") + _kib(status, "VmPTE:")


def _kib(text: str, key: str) -> int:
    line = next(line for line in text.splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def _time(call: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds; drop its result after the clock stops."""
    began = time.perf_counter()
    result = call()
    elapsed_s = time.perf_counter() - began
    del result
    return elapsed_s


# Decoding -----------------------------------------------------------------------------------------


def plain_loop(dtype: str, *paths: str) -> Numbers:
    """Read, convert and write whole files in one process, in the simplest way.

    Decoding is compared with this loop. It has no digest and no plan, and reuses its buffers. The
    dtype "raw" converts nothing.
    """
    import ml_dtypes
    import numpy as np

    targets = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
    buffer = bytearray(_BLOCK_NBYTES)
    converted = None
    if dtype != "raw":
        converted = np.empty(_BLOCK_NBYTES // 4, targets[dtype])
    nbytes = 0
    elapsed_s = 0.0
    for path in paths:
        with open(path, "rb", buffering=0) as shard, _fresh_file() as target:
            source, position = shard.fileno(), 0
            end = os.fstat(source).st_size
            offset = 8 + int.from_bytes(os.pread(source, 8, 0), "little")
            nbytes += end - offset
            began = time.perf_counter()
            while offset < end:
                got = os.preadv(source, [buffer], offset)
                if converted is None:
                    written = memoryview(buffer)[:got]
                else:
                    floats = np.frombuffer(buffer, np.float32, got // 4)
                    converted[: floats.size] = floats
                    written = converted[: floats.size].view(np.uint8).data
                position += os.pwrite(target, written, position)
                offset += got
            elapsed_s += time.perf_counter() - began
    return {"call_s": elapsed_s, "bytes_per_s": nbytes / elapsed_s}


def warm(source: str, dtype: str, workers: int | None) -> Numbers:
    """Make a source resident and leave it resident.

    Returns:
        `call_s` and read `bytes_per_s` of the whole call; `decode_bytes_per_s` of the coordinator's
        part, from when all workers are ready; 0 if nothing was decoded.
    """
    import shmload
    from shmload._decoding.coordinator import Coordinator

    decode = Coordinator.decode
    decode_s: list[float] = []

    def timed(self: Coordinator, *args: Any, **kwargs: Any) -> Any:
        # A worker's first message says that it is ready.
        waiting = {worker.channel for worker in self._workers}
        while waiting:
            waiting -= set(select.select(list(waiting), (), ())[0])
        began = time.perf_counter()
        try:
            return decode(self, *args, **kwargs)
        finally:
            decode_s.append(time.perf_counter() - began)

    Coordinator.decode = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    report = shmload.warm(source, dtype=dtype, workers=workers, progress=False)
    call_s = time.perf_counter() - began
    return {
        "call_s": call_s,
        "bytes_per_s": report.read_nbytes / call_s,
        "decode_bytes_per_s": report.read_nbytes / sum(decode_s) if decode_s else 0,
    }


@contextlib.contextmanager
def _fresh_file() -> Iterator[int]:
    """Open a new file in /dev/shm without a name, so that the kernel frees it in any case."""
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


# Floors -------------------------------------------------------------------------------------------


def memory_floors(path: str) -> Numbers:
    """Measure throughputs that no loader can beat, in bytes per second, over 1 GiB each."""
    return _copy_rates(path) | _shared_rates() | _private_rates()


def _copy_rates(path: str) -> Numbers:
    import numpy as np

    source = np.ones(_FLOOR_NBYTES, np.uint8)
    target = np.zeros_like(source)
    target[:] = source
    block = bytearray(_BLOCK_NBYTES)

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            for offset in range(0, _FLOOR_NBYTES, _BLOCK_NBYTES):
                os.preadv(file.fileno(), [block], offset)

    return {"copy": _rate(partial(np.copyto, target, source)), "read": _rate(read)}


def _shared_rates() -> Numbers:
    block = bytes(_BLOCK_NBYTES)
    with _fresh_file() as fd:

        def write() -> None:
            for offset in range(0, _FLOOR_NBYTES, _BLOCK_NBYTES):
                os.pwrite(fd, block, offset)

        found = {"allocate_shared": _rate(write), "rewrite_shared": _rate(write)}
        with mmap.mmap(fd, _FLOOR_NBYTES) as mapping:
            # One byte of each page, as the first use of attached weights does.
            found["touch_shared"] = _rate(
                partial(mapping.__getitem__, slice(None, None, _PAGE_NBYTES))
            )
    return found


def _private_rates() -> Numbers:
    with mmap.mmap(-1, _FLOOR_NBYTES) as mapping:
        ones = bytes([1]) * (_FLOOR_NBYTES // _PAGE_NBYTES)
        pages = slice(None, None, _PAGE_NBYTES)
        return {"allocate_private": _rate(partial(mapping.__setitem__, pages, ones))}


def _rate(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return _FLOOR_NBYTES / (time.perf_counter() - began)


_PROBES: dict[str, Callable[..., Numbers]] = {
    probe.__name__: probe for probe in (attach, repeat, plain_loop, warm, memory_floors)
}

if __name__ == "__main__":
    print("\n" + json.dumps(_PROBES[sys.argv[1]](*json.loads(sys.argv[2]))))
