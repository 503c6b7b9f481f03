"""Sources that are not in the page cache: the figures of `scripts/bench cold`."""

from benchmarks.bench import Bench, Suite
from benchmarks.figures import Figure, labelled, speed_up
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
            beside=labelled("{}, processor time", rounds.samples("cpu_s")),
        )
    ]


SUITE = Suite(
    measures={"first": measure_first},
    sources=("sd15-fp32",),
    disk_gb=6,
    shm_gb=3,
    memory_gb=13,
)
