"""Sources that are not in the page cache: the figures of `scripts/bench cold`."""

import mmap
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import slow_mount
from benchmarks.bench import Bench
from benchmarks.figures import Figure, Line, Target
from benchmarks.measures import FROM_PRETRAINED, LOAD_PIPELINE, warm_and_evict
from benchmarks.samples import Result, interleave
from benchmarks.sources import drop_page_cache, fill_page_cache, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK_NBYTES = 8 << 20
# A load by diffusers takes over two minutes.
_MOST_MOUNTED_ROUNDS = 3


def measure_cold(bench: Bench) -> list[Figure]:
    """A first load of files that are on the disk alone."""
    source = bench.sources.fp32
    files = weight_files(source)
    ways: dict[str, Callable[[], Result]] = {
        "shmload": bench.code(LOAD_PIPELINE, source),
        "diffusers": bench.code(FROM_PRETRAINED, source),
        "disk": partial(_read_disk, files),
        "warm": partial(warm_and_evict, bench, source, "bfloat16", None),
    }
    rounds = interleave(
        ways, bench.rounds, prepare=partial(drop_page_cache, files), announce=bench.announce
    )
    wall = {way: rounds.sample(way, "wall_s") for way in ("shmload", "diffusers")}
    disk = rounds.sample("disk", "bytes_per_s").scaled(1e-9)
    decode = rounds.sample("warm", "decode_bytes_per_s").scaled(1e-9)
    return [
        Figure(
            name="cold-first",
            what="source on the disk alone: whole process, speed-up over from_pretrained",
            sample=wall["diffusers"] / wall["shmload"],
            unit="x",
            target=Target(1.5, is_least=True),
            beside=(
                *(Line(label=way, sample=wall[way], unit="s") for way in wall),
                *(
                    Line(
                        label=f"{way}, processor time", sample=rounds.sample(way, "cpu_s"), unit="s"
                    )
                    for way in wall
                ),
            ),
        ),
        Figure(
            name="cold-rate",
            what="the same: rate of reading and decoding, of the disk's own sequential rate",
            sample=(decode / disk).scaled(100),
            unit="%",
            target=Target(90, is_least=True),
            beside=(
                Line(label="shmload, workers running", sample=decode, unit="GB/s"),
                Line(label="disk, O_DIRECT, 8 MiB at a time", sample=disk, unit="GB/s"),
            ),
        ),
    ]


def measure_mount(bench: Bench) -> list[Figure]:
    """A FUSE mount with a latency and a rate a stream, as object stores have them."""
    source = bench.sources.fp32
    with tempfile.TemporaryDirectory(dir=bench.sources.work, prefix="mount-") as target:

        def mounted(code: str) -> Result:
            return bench.processes.time_command(_prefix(source, target), code.format(source=target))

        rounds = interleave(
            {
                "shmload": partial(mounted, LOAD_PIPELINE),
                "diffusers": partial(mounted, FROM_PRETRAINED),
            },
            min(bench.rounds, _MOST_MOUNTED_ROUNDS),
            prepare=partial(fill_page_cache, weight_files(source)),  # below the mount
            announce=bench.announce,
        )
    wall = {way: rounds.sample(way, "wall_s") for way in rounds.results}
    return [
        Figure(
            name="mount",
            what="FUSE, 5 ms a request, 200 MB/s a stream: whole process, over from_pretrained",
            sample=wall["diffusers"] / wall["shmload"],
            unit="x",
            target=Target(5, is_least=True),
            beside=tuple(Line(label=way, sample=wall[way], unit="s") for way in wall),
        )
    ]


def _prefix(source: Path, target: str) -> list[str]:
    """Return the command that runs another one while a source is mounted."""
    unshare = ["unshare", "--mount"]
    if os.geteuid() != 0:
        unshare += ["--user", "--map-root-user"]
    return [*unshare, sys.executable, slow_mount.__file__, str(source), target]


def _read_disk(files: list[Path]) -> Result:
    """Read files one after the other, past the page cache; return `bytes_per_s`."""
    nbytes = 0
    with mmap.mmap(-1, _BLOCK_NBYTES) as buffer:
        buffer.write(bytes(_BLOCK_NBYTES))  # its pages are there before the clock starts
        began = time.perf_counter()
        for file in files:
            fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
            try:
                offset = 0
                while got := os.preadv(fd, [buffer], offset):
                    offset += got
                    if got < _BLOCK_NBYTES:
                        break
                nbytes += offset
            finally:
                os.close(fd)
        return {"bytes_per_s": nbytes / (time.perf_counter() - began)}


COLD_MEASURES = {"cold": measure_cold, "mount": measure_mount}
