"""The suites of `scripts/bench`: their measurements, sources and needs of disk and memory."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.cold_measures import COLD_MEASURES
from benchmarks.figures import Figure
from benchmarks.format_measures import FORMAT_MEASURES
from benchmarks.gpu_measures import GPU_MEASURES
from benchmarks.many_measures import MANY_MEASURES, PROCESSES
from benchmarks.measures import MEASURES
from benchmarks.ready_measures import READY_MEASURES
from benchmarks.service_measures import SERVICE_MEASURES
from benchmarks.several_measures import SEVERAL_MEASURES
from benchmarks.sources import Sources


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Measurements that run together."""

    measures: Mapping[str, Callable[[Bench], list[Figure]]]
    """Measurements by their name for `--only`."""
    sources: tuple[Path, ...]
    """The sources that they use."""
    disk_nbytes: float
    """Size of the sources on disk."""
    shm_nbytes: float
    """Most that is resident in /dev/shm at a time."""
    memory_nbytes: float
    """Memory for the page cache, the segments or a private copy of them, and the rest."""


SUITES = ("load", "ready", "service", "many", "formats", "cold", "gpu")


def suite_of(name: str, sources: Sources, only: Collection[str] = ()) -> Suite:
    """Return a suite.

    Args:
        name: one of `SUITES`.
        sources: their sizes decide what the suite needs.
        only: names of its measurements that are wanted; none for all.
    """
    if name == "gpu":
        nbytes = sources.flux_nbytes
        # float32 has twice the bytes, and one measurement wants it.
        converts = not only or "convert" in only
        return Suite(
            measures=GPU_MEASURES,
            sources=(
                sources.flux_small,
                *((sources.flux_fp32,) if converts else ()),
                sources.flux_bf16,
            ),
            disk_nbytes=(3.1 if converts else 1.1) * nbytes,
            shm_nbytes=1.1 * nbytes + 1e9,  # and rings
            memory_nbytes=(5 if converts else 3) * nbytes + 4e9,
        )
    if name == "many":
        return Suite(
            measures=MANY_MEASURES,
            sources=(sources.small, sources.fp32),
            disk_nbytes=6e9,
            shm_nbytes=3e9,
            # diffusers alone needs a copy of the weights and an interpreter per process.
            memory_nbytes=PROCESSES * (2.14e9 + 0.4e9),
        )
    if name == "ready":
        return Suite(
            measures=READY_MEASURES | SEVERAL_MEASURES,
            sources=(sources.fp32, sources.bf16),
            disk_nbytes=9e9,
            shm_nbytes=6e9,
            memory_nbytes=16e9,
        )
    if name == "cold":
        return Suite(
            measures=COLD_MEASURES,
            sources=(sources.fp32,),
            disk_nbytes=6e9,
            shm_nbytes=3e9,
            memory_nbytes=13e9,
        )
    if name == "formats":
        return Suite(
            measures=FORMAT_MEASURES,
            sources=(
                sources.small,
                sources.fp32,
                sources.bf16,
                sources.fp32_bin,
                sources.bf16_bin,
                sources.sdxl_file,
                sources.gguf,
                sources.gguf_whole,
                sources.gguf_small,
            ),
            disk_nbytes=30e9,
            shm_nbytes=8e9,
            memory_nbytes=22e9,
        )
    return Suite(
        measures=MEASURES if name == "load" else SERVICE_MEASURES,
        sources=(
            sources.small,
            sources.tensors,
            sources.flux_small,
            sources.keys,
            sources.fp32,
            sources.bf16,
        ),
        disk_nbytes=9e9,
        shm_nbytes=3e9,
        memory_nbytes=13e9,
    )
