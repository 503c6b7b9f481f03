"""Sources that are not in the page cache: the figures of `scripts/bench cold`."""

import mmap
import os
import time
from functools import partial
from pathlib import Path

from benchmarks.bench import Bench, Suite, Way, weight_files
from benchmarks.figures import Figure, Result, labelled, speed_up
from benchmarks.load import FROM_PRETRAINED, LOAD_PIPELINE, warm_and_evict

_BLOCK_NBYTES = 8 << 20


def measure_cold(bench: Bench) -> list[Figure]:
    """A first load of files that are on the disk alone."""
    source = bench.source("sd15-fp32")
    ways: dict[str, Way] = {
        "shmload": bench.python(LOAD_PIPELINE, source),
        "diffusers": bench.python(FROM_PRETRAINED, source),
        "disk, O_DIRECT, 8 MiB at a time": partial(_read_disk, weight_files(source)),
        "shmload, workers running": partial(warm_and_evict, bench, source),
    }
    rounds = bench.measure(ways, source, is_cold=True)
    _, _, disk, decoding = ways
    rates = {
        decoding: rounds.sample(decoding, "decode_bytes_per_s"),
        disk: rounds.sample(disk, "bytes_per_s"),
    }
    return [
        speed_up(
            "cold-first",
            "source on the disk alone: whole process, speed-up over from_pretrained",
            rounds.samples("wall_s"),
            at_least=1.5,
            beside=labelled("{}, processor time", rounds.samples("cpu_s")),
        ),
        Figure(
            name="cold-rate",
            what="the same: rate of reading and decoding, of the disk's own sequential rate",
            sample=(rates[decoding] / rates[disk]).scaled(100, "%"),
            at_least=90,
            beside=rates,
        ),
    ]


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


SUITE = Suite(
    measures={"cold": measure_cold},
    sources=("sd15-fp32",),
    disk_gb=6,
    shm_gb=3,
    memory_gb=13,
)
