"""Probes of the service's clients, each in a process: `service_probes.py NAME ARGUMENTS`.

As in `probes`, only the standard library is imported at the top.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

Numbers = dict[str, float]

_TICK_S = 0.01


def attach_part(source: str) -> Numbers:
    """Make the calls to the service that an attach makes, and time only these.

    Each line on stdin starts one attach, so that many processes can start at once. Prints each time
    in seconds.
    """
    from shmload._segments.listing import segments
    from shmload._service.client import find_service

    names = [info.name for info in segments() if info.source.startswith(source + os.sep)]
    print("READY", flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        service = find_service()
        assert service
        service.note(names, ())
        service.close()
        print(time.perf_counter() - began, flush=True)
    return {}


def ticker_gap(source: str) -> Numbers:
    """Load a source while another thread of the process wakes up every 10 ms.

    Returns:
        `gap_s`, the longest delay of a wake-up; `load_s` of the load.
    """
    import shmload

    gaps: list[float] = []
    is_done = threading.Event()

    def tick() -> None:
        while not is_done.is_set():
            began = time.perf_counter()
            time.sleep(_TICK_S)
            gaps.append(time.perf_counter() - began - _TICK_S)

    import torch  # noqa: F401 import it outside the measured time

    ticker = threading.Thread(target=tick)
    ticker.start()
    began = time.perf_counter()
    report = shmload.warm(source, dtype="bfloat16")
    load_s = time.perf_counter() - began
    is_done.set()
    ticker.join()
    shmload.evict(*report.segments)
    return {"gap_s": max(gaps), "load_s": load_s}


def rounds(source: str, count: int) -> Numbers:
    """Load and release a source many times.

    Returns:
        The growth over all rounds of `descriptors`, `children`, `names` in /dev/shm, and
        `private_nbytes` of memory.
    """
    import gc

    import shmload

    def once() -> None:
        state = shmload.load_state_dict(source, "bfloat16")
        del state
        gc.collect()

    for _ in range(3):  # imports and first allocations do not count
        once()
    before = _held()
    for _ in range(count):
        once()
    after = _held()
    return {name: after[name] - before[name] for name in before}


def _held() -> Numbers:
    rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = next(line for line in rollup if line.startswith("Anonymous:"))
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": sum(map(len, children)),
        "names": sum(name.startswith("shmload-") for name in os.listdir("/dev/shm")),
        "private_nbytes": int(private.split()[1]) * 1024,
    }


_PROBES: dict[str, Callable[..., Numbers]] = {
    "attach_part": attach_part,
    "ticker_gap": ticker_gap,
    "rounds": rounds,
}

if __name__ == "__main__":
    name, arguments = sys.argv[1:]
    print(json.dumps(_PROBES[name](*json.loads(arguments))))
