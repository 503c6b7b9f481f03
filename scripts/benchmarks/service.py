"""The service's costs, restart and leaks: the figures of `scripts/bench service`."""

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from proc import children, open_files

from benchmarks.attach import Attach
from benchmarks.bench import Bench, Suite
from benchmarks.figures import Figure, Sample
from benchmarks.probes import (
    Clients,
    Numbers,
    command_of,
    private_nbytes,
    tell,
    warm,
)

_CLIENTS = 32
_CALLS = 20
_ROUNDS = 200
_TICK_S = 0.01
_LOOK_S = 0.05
_BUDGET = "8GiB"
_ALONE = {"SHMLOAD_SERVICE": "off"}


@contextlib.contextmanager
def running_service(bench: Bench, *arguments: str) -> Iterator[dict[str, str]]:
    """Run a service; yield the environment variables that lead clients to it."""
    with tempfile.TemporaryDirectory(prefix="shmload-bench-") as folder:
        variables = {"SHMLOAD_SOCKET": f"{folder}/run/service.sock", "SHMLOAD_SERVICE": "require"}
        log = Path(folder, "log")
        with log.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "shmload", "serve", "--budget", _BUDGET, *arguments],
                env=bench.environment | variables,
                stderr=said,
            )
        try:
            while "serving at" not in log.read_text():
                if process.poll() is not None:
                    raise RuntimeError(f"the service did not start: {log.read_text()}")
                time.sleep(_LOOK_S)
            yield variables
        finally:
            process.kill()
            process.wait()


def measure_attach(bench: Bench) -> list[Figure]:
    """An attach through the service, against an attach without it."""
    source = bench.source("sd15-fp32")
    run = partial(Attach(bench, source).by, "shmload")
    with running_service(bench) as variables:
        bench.warm(source)
        ways = {"without": run(**_ALONE), "through the service": run(**variables)}
        found = bench.measure(ways, source).samples("call_s")
    bench.evict()
    calls = {way: sample.scaled(1e3, "ms") for way, sample in found.items()}
    return [
        Figure(
            name="service-attach",
            what="attach through the service: time added to an attach without one",
            sample=calls["through the service"] - calls["without"],
            at_most=5,
            beside=calls,
        )
    ]


def measure_crowd(bench: Bench) -> list[Figure]:
    """Many clients attach at once: how long the service takes for each."""
    source = bench.source("sd15-fp32")
    with running_service(bench) as variables:
        bench.warm(source)
        calls = [
            1e3 * call_s
            for _ in range(bench.rounds)
            for call_s in bench.ask(crowd, source, **variables)
        ]
    bench.evict()
    ordered = sorted(calls)
    return [
        Figure(
            name="service-crowd",
            what=f"{_CLIENTS} clients attach at once: the service's part, 99th percentile",
            sample=Sample((ordered[int(len(ordered) * 0.99)],), "ms"),
            at_most=50,
            beside={
                "median": Sample((statistics.median(calls),), "ms"),
                "worst": Sample((ordered[-1],), "ms"),
                "attaches": Sample((float(len(calls)),)),
            },
        )
    ]


def crowd(source: str) -> list[float]:
    """Let clients make the calls of an attach at once; return the times of all, in seconds."""
    with Clients(command_of(attach_part, source), _CLIENTS) as clients:
        clients.hear()
        return [float(took) for _ in range(_CALLS) for took in clients.ask()]


def attach_part(source: str) -> None:
    """Make the calls to the service that an attach makes, and time only these."""
    from shmload._segments.listing import segments
    from shmload._segments.roots import Root
    from shmload._service.client import find_service

    names = [info.name for info in segments() if info.source.startswith(source + os.sep)]
    tell()
    for _ in sys.stdin:
        began = time.perf_counter()
        service = find_service()
        assert service
        service.note(Root(path=source), names, ())
        service.close()
        tell(time.perf_counter() - began)


def measure_ticker(bench: Bench) -> list[Figure]:
    """A Python thread's delay while other processes decode and leave it a core."""
    source = bench.source("sd15-fp32")
    run = partial(bench.probe, ticker_gap, source)
    with running_service(bench, "--workers", "1") as variables:
        ways = {"service": run(**variables), "workers": run(**_ALONE, SHMLOAD_WORKERS="1")}
        found = bench.measure(ways, source)
    return [
        Figure(
            name=f"ticker-{way}",
            what=f"a 10 ms ticker in Python while {who}: its worst gap",
            sample=found.sample(way, "gap_s").scaled(1e3, "ms"),
            at_most=50,
            beside={"the load": found.sample(way, "load_s")},
        )
        for way, who in (("service", "the service decodes"), ("workers", "its own workers decode"))
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


def measure_restart(bench: Bench) -> list[Figure]:
    """Weights that the next service reads again after the first was killed."""
    source = bench.source("sd15-fp32")
    read: list[float] = []
    for _ in range(bench.rounds):
        with running_service(bench) as variables:
            bench.ask(warm, source, **variables)
        with running_service(bench) as variables:  # leaving the block above killed the first
            bench.ask(warm, source, **variables)
            command = [sys.executable, "-P", "-m", "shmload", "status", "--json"]
            status = json.loads(bench.run(command, variables).output)
            read.append(status["service"]["read_nbytes"])
    bench.evict()
    return [
        Figure(
            name="service-restart",
            what="weights read again by the service that follows one after kill -9",
            sample=Sample(tuple(read), "bytes"),
            at_most=0,
        )
    ]


def measure_rounds(bench: Bench) -> list[Figure]:
    """Many loads and releases: descriptors, children, names and memory left over."""
    count = 5 if bench.is_quick else _ROUNDS
    source = bench.source("small-fp32") / "vae"
    run = partial(bench.ask, rounds, source, count, SHMLOAD_INLINE_NBYTES="1")
    with running_service(bench) as variables:
        found = {"with": run(**variables)}
    found["without"] = run(**_ALONE)
    bench.evict()
    return [
        Figure(
            name=f"rounds-{how}-{name}",
            what=f"{count} loads and releases {how} a service: {name} left over",
            sample=Sample((value,)),
            at_most=1e6 if name == "private_nbytes" else 0,
        )
        for how, left in found.items()
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
        "attach": measure_attach,
        "crowd": measure_crowd,
        "ticker": measure_ticker,
        "restart": measure_restart,
        "rounds": measure_rounds,
    },
    sources=("small-fp32", "sd15-fp32"),
    disk_gb=9,
    shm_gb=3,
    memory_gb=13,
)
