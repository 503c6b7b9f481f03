"""Many processes with one pipeline: the figures of `scripts/bench many`."""

import re
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.many_probes import MODELS
from benchmarks.samples import Result, Sample
from benchmarks.sources import weight_files

PROCESSES = 8
VIEWERS = 4
_PROBES = Path(__file__).with_name("many_probes.py")
# strace: `pread64(7</path/model.safetensors>, ..., 4096, 0) = 4096`.
_READ = re.compile(r"= (\d+)$", re.MULTILINE)
_READING_CALLS = "read,pread64,readv,preadv,preadv2,sendfile,copy_file_range,mmap"


def measure_ready(bench: Bench) -> list[Figure]:
    """Time until all processes are ready, and the memory that they take."""
    large, small = bench.sources.fp32, bench.sources.small
    ways: dict[str, Callable[[], Result]] = {
        f"{name}, {size}": partial(_probe, bench, name, source)
        for name in ("plain", "job")
        for size, source in (("small", small), ("large", large))
    }
    found = bench.measure(ways, large)
    ready = {way: found.sample(way, "ready_s") for way in ways}
    # Subtract the interpreters' own memory: the same processes with tiny models.
    memory = {
        name: found.sample(f"{name}, large", "pss_nbytes")
        - found.sample(f"{name}, small", "pss_nbytes")
        for name in ("plain", "job")
    }
    copy = weights_nbytes(large) / 2  # bfloat16
    copies = {name: sample.scaled(1 / copy) for name, sample in memory.items()}
    count = f"{PROCESSES} processes"
    return [
        Figure(
            name="many-ready",
            what=f"{count} ready: speed-up over {PROCESSES} that call from_pretrained",
            sample=ready["plain, large"] / ready["job, large"],
            unit="x",
            target=Target(5, is_least=True),
            beside=(
                Line(label="a job's", sample=ready["job, large"], unit="s"),
                Line(label="diffusers", sample=ready["plain, large"], unit="s"),
                Line(label="a job's, tiny models", sample=ready["job, small"], unit="s"),
                Line(label="diffusers, tiny models", sample=ready["plain, small"], unit="s"),
            ),
        ),
        Figure(
            name="many-memory",
            what=f"memory of all {PROCESSES} (PSS, no interpreters), in copies of the weights",
            sample=copies["job"],
            unit="x",
            target=Target(1.05),
            beside=(Line(label="diffusers", sample=copies["plain"], unit="x"),),
        ),
    ]


def measure_views(bench: Bench) -> list[Figure]:
    """Memory of unchanged programs that load one view directory."""
    large, small = bench.sources.fp32, bench.sources.small
    ways: dict[str, Callable[[], Result]] = {
        size: partial(_probe, bench, "view", source, count=VIEWERS)
        for size, source in (("small", small), ("large", large))
    }
    found = bench.measure(ways, large)
    memory = found.sample("large", "pss_nbytes") - found.sample("small", "pss_nbytes")
    return [
        Figure(
            name="many-views",
            what=f"memory of {VIEWERS} unchanged programs over one view directory (PSS, no "
            "interpreters), in copies of the weights",
            sample=memory.scaled(2 / weights_nbytes(large)),
            unit="x",
            target=Target(1.05),
            beside=(
                Line(label="ready", sample=found.sample("large", "ready_s"), unit="s"),
                Line(label="tiny models", sample=found.sample("small", "ready_s"), unit="s"),
            ),
        )
    ]


def measure_reads(bench: Bench) -> list[Figure]:
    """Bytes that all processes of a job read of the source."""
    if not shutil.which("strace"):
        bench.announce("left out: strace is not installed")
        return []
    source = bench.sources.fp32
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        watched = [option for path in _shards(source) for option in ("-P", str(path))]
        command = ["strace", "-f", "-qq", "-e", f"trace={_READING_CALLS}", *watched]
        _probe(bench, "job", source, prefix=(*command, "-o", str(trace)))
        text = trace.read_text()
    if "mmap(" in text:
        raise RuntimeError("the source was mapped; reads through a mapping cannot be counted")
    nbytes = sum(int(match) for match in _READ.findall(text))
    share = nbytes / weights_nbytes(source)
    return [
        Figure(
            name="many-reads",
            what=f"bytes read of the source by all {PROCESSES}, as a share of its size",
            sample=Sample((share,)),
            unit="times",
            target=Target(1.01),
        )
    ]


def measure_one_more(bench: Bench) -> list[Figure]:
    """Start of one more process in a running job, and the time lost to a killed process."""
    source = bench.sources.fp32
    found = bench.measure({"job": partial(_probe, bench, "one_more", source)}, source)
    return [
        Figure(
            name="many-one-more",
            what="one more process in a running job: time to its first item",
            sample=found.sample("job", "start_s").scaled(1e3),
            unit="ms",
            target=Target(500),
        ),
        Figure(
            name="many-killed",
            what="time lost to a killed process, besides its own item",
            sample=found.sample("job", "lost_s").scaled(1e3),
            unit="ms",
            target=Target(1000),
        ),
    ]


def weights_nbytes(source: Path) -> int:
    """Return the size of the weight files of the loaded models, in bytes."""
    return sum(path.stat().st_size for path in _shards(source))


def _shards(source: Path) -> list[Path]:
    return [path for path in weight_files(source) if path.parent.name in MODELS]


def _probe(
    bench: Bench,
    name: str,
    source: Path,
    prefix: tuple[str, ...] = (),
    count: int = PROCESSES,
) -> Result:
    processes = bench.processes.of(_PROBES)
    return processes.probe(name, source, count, prefix=prefix, STARTED_AT=str(time.monotonic()))


MANY_MEASURES: dict[str, Callable[[Bench], list[Figure]]] = {
    "ready": measure_ready,
    "reads": measure_reads,
    "one-more": measure_one_more,
    "views": measure_views,
}
