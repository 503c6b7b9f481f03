"""Sources on a web server on the loopback: a figure of `scripts/bench formats`."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target

_SERVER = Path(__file__).with_name("range_server.py")
_PROBES = Path(__file__).with_name("bucket_probes.py")
_WORKERS = 2
_FILE = "unet/diffusion_pytorch_model.safetensors"


def measure_bucket(bench: Bench) -> list[Figure]:
    """The weights of a UNet in float32, without a cast: against obstore alone.

    Beside it: against obstore whose bytes are written to shared memory, which is the least that a
    load by obstore does.
    """
    source = bench.sources.fp32
    processes = bench.processes.of(_PROBES)
    with _serving(source) as server:
        url = f"{server}/{_FILE}"
        ways = {
            "shmload": lambda: processes.probe("warm", url, _WORKERS),
            "obstore": lambda: processes.probe("bare", url, _WORKERS),
            "obstore, written": lambda: processes.probe("stored", url, _WORKERS),
        }
        rounds = bench.measure(ways, source)
    rates = {way: rounds.sample(way, "bytes_per_s").scaled(1e-9) for way in ways}
    beside = [Line(label=way, sample=sample, unit="GB/s") for way, sample in rates.items()]
    written = rates["shmload"] / rates["obstore, written"]
    beside.append(Line(label="part of obstore's rate, written", sample=written, unit="x"))
    for label, key in (("on the disk", "cache_nbytes"), ("largest worker", "worker_nbytes")):
        sample = rounds.sample("shmload", key).scaled(1e-6)
        beside.append(Line(label=label, sample=sample, unit="MB"))
    figure = Figure(
        name="bucket",
        what="read 3.4 GB from a server on this machine into a segment: part of obstore's rate",
        sample=rates["shmload"] / rates["obstore"],
        unit="x",
        target=Target(0.85, is_least=True),
        beside=tuple(beside),
    )
    return [figure]


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
