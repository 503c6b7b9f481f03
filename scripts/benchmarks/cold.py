"""Sources that are not in the page cache: the figures of `scripts/bench cold`."""

from functools import partial

from benchmarks import probes
from benchmarks.bench import Bench, Suite, weight_files
from benchmarks.figures import Figure, Way, speed_up
from benchmarks.load import whole_process


def measure_first(bench: Bench) -> list[Figure]:
    """A first load of files that are on the disk alone."""
    rounds = whole_process(bench, bench.source("sd15-fp32"), is_cold=True)
    return [
        speed_up(
            "cold-first",
            "source on the disk alone: whole process, speed-up over from_pretrained",
            rounds.samples("wall_s"),
            at_least=1.5,
        )
    ]


def measure_disk(bench: Bench) -> list[Figure]:
    """Decoding files that are on the disk alone, against reading them and no more."""
    source = bench.source("sd15-fp32")
    read = "the disk, O_DIRECT, 8 MiB at a time"
    ways: dict[str, Way] = {
        "shmload": partial(bench.decode, source),
        read: bench.probe(probes.read_files, *weight_files(source)),
    }
    rates = bench.measure(ways, source, is_cold=True).samples("bytes_per_s")
    return [
        Figure(
            name="cold-disk",
            what="decoding fp32 to bf16, source on the disk alone: rate, of the disk's own",
            sample=(rates["shmload"] / rates[read]).scaled(100, "%"),
            at_least=90,
            beside=rates,
        )
    ]


SUITE = Suite(
    measures={"first": measure_first, "disk": measure_disk},
    sources=("sd15-fp32",),
    disk_gb=6,
    shm_gb=3,
    memory_gb=13,
)
