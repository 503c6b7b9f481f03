"""Sources on a web server on the loopback: a figure of `scripts/bench formats`."""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, labelled
from benchmarks.probes import Numbers

_SERVER = Path(__file__).with_name("range_server.py")
_WORKERS = 2
_FILE = "unet/diffusion_pytorch_model.safetensors"
_RANGE_NBYTES = 8 << 20
_REQUESTS = 4


def measure_bucket(bench: Bench) -> list[Figure]:
    """The weights of a UNet in float32, without a cast: against obstore alone.

    Beside it: against obstore whose bytes are written to shared memory, which is the least that a
    load by obstore does.
    """
    source = bench.source("sd15-fp32")
    with _serving(source) as server:
        url = f"{server}/{_FILE}"
        ways = {
            "shmload": bench.probe(load, url),
            "obstore": bench.probe(read, url, False),
            "obstore, written": bench.probe(read, url, True),
        }
        rounds = bench.measure(ways, source)
    rates = rounds.samples("bytes_per_s")
    ratios = {way: rates["shmload"] / rates[way] for way in ("obstore", "obstore, written")}
    return [
        Figure(
            name="bucket",
            what="read 3.4 GB from a server on this machine into a segment: part of obstore's rate",
            sample=ratios["obstore"],
            at_least=0.85,
            beside=rates
            | {"part of obstore's rate, written": ratios["obstore, written"]}
            | labelled("on the disk", rounds.samples("cache_nbytes"))
            | labelled("largest worker", rounds.samples("worker_nbytes")),
        )
    ]


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[str]:
    """Serve a folder; yield its URL."""
    command = [sys.executable, str(_SERVER), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.stdin.close()
            server.wait(30)


def load(url: str) -> Numbers:
    """Make an object resident in its own dtype by some workers, and remove it.

    Returns:
        `bytes_per_s` of reading; `cache_nbytes`, what the mirror takes on the disk;
        `worker_nbytes`, the largest resident memory of a worker.
    """
    import shmload
    from shmload._checkpoints.remote import mirror_home

    report = shmload.warm(url, workers=_WORKERS)
    shmload.evict(*report.segments)
    blobs = mirror_home(url).rglob("*")
    return {
        "bytes_per_s": report.read_nbytes / report.times_s["reading"],
        "cache_nbytes": sum(512 * path.lstat().st_blocks for path in blobs if path.is_file()),
        "worker_nbytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    }


def read(url: str, is_written: bool) -> Numbers:
    """Read an object's ranges by obstore in some processes.

    Args:
        url: of the object.
        is_written: whether the ranges go to a file in shared memory; else they are dropped.

    Returns:
        `bytes_per_s`, from the first request to the end of the last process.
    """
    folder, _, name = url.rpartition("/")
    # Not by obstore: its threads would not be in the forked processes.
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as answer:
        nbytes = int(answer.headers["Content-Length"])
    ranges = [(at, min(at + _RANGE_NBYTES, nbytes)) for at in range(0, nbytes, _RANGE_NBYTES)]
    with tempfile.TemporaryFile(dir="/dev/shm") as target:
        began = time.perf_counter()
        children = []
        for number in range(_WORKERS):
            child = os.fork()
            if child == 0:
                fd = target.fileno() if is_written else None
                _read_ranges(folder, name, ranges[number::_WORKERS], fd)
                os._exit(0)
            children.append(child)
        for child in children:
            if os.waitpid(child, 0)[1]:
                raise SystemExit("a process failed")
        return {"bytes_per_s": nbytes / (time.perf_counter() - began)}


def _read_ranges(folder: str, name: str, ranges: list[tuple[int, int]], target: int | None) -> None:
    import obstore
    from obstore.store import from_url

    store = from_url(folder, client_options={"allow_http": True})

    def read_one(each: tuple[int, int]) -> None:
        content = obstore.get_range(store, name, start=each[0], end=each[1])
        if target is not None:
            os.pwrite(target, content, each[0])

    with ThreadPoolExecutor(_REQUESTS) as pool:
        list(pool.map(read_one, ranges))
