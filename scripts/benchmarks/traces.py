"""What loads leave behind, and what they cost others: the figures of `scripts/bench traces`."""

import gc
import os
import threading
import time

from proc import children, open_files

from benchmarks.bench import Bench, Suite
from benchmarks.figures import Figure, Sample
from benchmarks.probes import Numbers, private_nbytes

_ROUNDS = 200
_TICK_S = 0.01


def measure_ticker(bench: Bench) -> list[Figure]:
    """A Python thread's delay while other processes decode and leave it a core."""
    source = bench.source("sd15-fp32")
    ways = {"workers": bench.probe(ticker_gap, source, SHMLOAD_WORKERS="1")}
    found = bench.measure(ways, source)
    return [
        Figure(
            name="ticker-workers",
            what="a 10 ms ticker in Python while its own workers decode: its worst gap",
            sample=found.sample("workers", "gap_s").scaled(1e3, "ms"),
            at_most=50,
            beside={"the load": found.sample("workers", "load_s")},
        )
    ]


def ticker_gap(source: str) -> Numbers:
    """Load a source while another thread of the process wakes up every 10 ms.

    Returns:
        `gap_s`, the longest delay of a wake-up; `load_s` of the load.
    """
    import torch  # noqa: F401 import it outside the measured time

    import shmload

    gaps: list[float] = []
    is_done = threading.Event()

    def tick() -> None:
        while not is_done.is_set():
            began = time.perf_counter()
            time.sleep(_TICK_S)
            gaps.append(time.perf_counter() - began - _TICK_S)

    ticker = threading.Thread(target=tick)
    ticker.start()
    began = time.perf_counter()
    report = shmload.warm(source, dtype="bfloat16")
    load_s = time.perf_counter() - began
    is_done.set()
    ticker.join()
    shmload.evict(*report.segments)
    return {"gap_s": max(gaps), "load_s": load_s}


def measure_rounds(bench: Bench) -> list[Figure]:
    """Many loads and releases: descriptors, children, names and memory left over."""
    count = 5 if bench.is_quick else _ROUNDS
    source = bench.source("small-fp32") / "vae"
    left = bench.ask(rounds, source, count, SHMLOAD_INLINE_NBYTES="1")
    bench.evict()
    return [
        Figure(
            name=f"rounds-{name}",
            what=f"{count} loads and releases: {name} left over",
            sample=Sample((value,)),
            at_most=1e6 if name == "private_nbytes" else 0,
        )
        for name, value in left.items()
    ]


def rounds(source: str, count: int) -> Numbers:
    """Load and release a source many times.

    Returns:
        The growth over all rounds of `descriptors`, `children`, `names` in /dev/shm, and
        `private_nbytes` of memory.
    """
    import shmload

    def load(times: int) -> Numbers:
        for _ in range(times):
            shmload.load_state_dict(source, "bfloat16")
            gc.collect()
        return _held()

    before = load(3)  # imports and first allocations do not count
    after = load(count)
    return {name: after[name] - before[name] for name in before}


def _held() -> Numbers:
    return {
        "descriptors": len(open_files("self")),
        "children": len(children("self")),
        "names": sum(name.startswith("shmload-") for name in os.listdir("/dev/shm")),
        "private_nbytes": private_nbytes(),
    }


SUITE = Suite(
    measures={
        "ticker": measure_ticker,
        "rounds": measure_rounds,
    },
    sources=("small-fp32", "sd15-fp32"),
    disk_gb=9,
    shm_gb=3,
    memory_gb=13,
)
