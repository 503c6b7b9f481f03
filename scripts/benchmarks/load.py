"""One process: the figures of `scripts/bench load`."""

import mmap
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.attach import Attach, load_pipeline, touched
from benchmarks.bench import Bench, Suite, Way, weight_files, weights_nbytes
from benchmarks.figures import Figure, Result, Rounds, better, labelled
from benchmarks.keys import measure_keys, measure_tensors
from benchmarks.probes import Numbers, time_call, warm

# The times of two whole processes vary by more than the 3 % of this target: take more rounds.
_SAME_DTYPE_FACTOR = 3
_SMALL_CALLS = 7
_BLOCK_NBYTES = 1 << 20
_PAGE_NBYTES = 4096
_FLOOR_NBYTES = 1 << 30

_IMPORTS = """\
import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
from transformers import CLIPImageProcessor, CLIPTextModel, CLIPTokenizer
"""
FROM_PRETRAINED = """\
import torch
from diffusers import StableDiffusionPipeline
StableDiffusionPipeline.from_pretrained({source!r}, torch_dtype=torch.bfloat16)
"""
LOAD_PIPELINE = """\
import shmload
shmload.load_pipeline({source!r}, dtype="bfloat16")
"""
PARALLEL = {"HF_ENABLE_PARALLEL_LOADING": "1"}


# Whole pipelines ----------------------------------------------------------------------------------


def measure_attach(bench: Bench) -> list[Figure]:
    """`load_pipeline` with weights in memory: time, with and without first use; private memory."""
    attach = Attach(bench, bench.source("sd15-fp32"))
    rounds = attach.rounds(
        without=attach.by_shmload(SHMLOAD_REMEMBER="0"),
        sequential=attach.by("diffusers"),
        parallel=attach.by("diffusers", **PARALLEL),
    )
    calls, private = rounds.samples("call_s"), rounds.samples("private_nbytes")
    best = better(calls)
    both = touched(rounds)
    weights = rounds.sample("shmload", "weights_nbytes")
    return [
        Figure(
            name="attach",
            what="load_pipeline with weights in memory: speed-up over from_pretrained",
            sample=calls[best] / calls["shmload"],
            at_least=15,
            beside={
                "shmload": calls["shmload"],
                "shmload, with SHMLOAD_REMEMBER=0": calls["without"],
                "diffusers, the better": calls[best],
                "diffusers, sequential": calls["sequential"],
                "diffusers, parallel": calls["parallel"],
            },
        ),
        Figure(
            name="first-use",
            what="the same call and a touch of every page: speed-up over from_pretrained",
            sample=both[best] / both["shmload"],
            beside={
                "shmload": both["shmload"],
                "shmload, the touch alone": rounds.sample("shmload", "touch_s"),
                "diffusers, the better": both[best],
            },
        ),
        Figure(
            name="memory",
            what="what it adds to the process's private memory, as a share of the weights",
            sample=(private["shmload"] / weights).scaled(100, "%"),
            at_most=2,
            beside={
                "shmload": private["shmload"],
                "diffusers": private[best],
                "weights of the pipeline": weights,
            },
        ),
    ]


def whole_process(bench: Bench, source: Path, *, factor: int = 1, is_cold: bool = False) -> Rounds:
    """Measure processes that load a source and end, by shmload and by diffusers."""
    ways = {
        "shmload": bench.python(LOAD_PIPELINE, source),
        "diffusers": bench.python(FROM_PRETRAINED, source),
    }
    return bench.measure(ways, source, factor=factor, is_cold=is_cold)


def measure_first_load(bench: Bench) -> list[Figure]:
    """First load, nothing in memory: the time of a whole process."""
    source = bench.source("sd15-fp32")

    def without_memory() -> Result:
        with tempfile.TemporaryDirectory(dir=bench.work) as empty:
            return bench.python(LOAD_PIPELINE, source, SHMLOAD_CACHE_DIR=empty)()

    ways = {
        "imports alone": bench.python(_IMPORTS),
        "shmload": bench.python(LOAD_PIPELINE, source),
        "diffusers": bench.python(FROM_PRETRAINED, source),
        "shmload, nothing remembered yet": without_memory,
    }
    rounds = bench.measure(ways, source)
    wall = rounds.samples("wall_s")
    return [
        Figure(
            name="first-load",
            what="first load, nothing in memory: whole process, against imports alone",
            sample=wall["shmload"] / wall["imports alone"],
            at_most=1.10,
            beside=wall | labelled("{}, processor time", rounds.samples("cpu_s")),
        )
    ]


def measure_same_dtype(bench: Bench) -> list[Figure]:
    """Load without a cast, where shmload saves no conversion: it must not cost time."""
    rounds = whole_process(bench, bench.source("sd15-bf16"), factor=_SAME_DTYPE_FACTOR)
    wall = rounds.samples("wall_s")
    return [
        Figure(
            name="same-dtype",
            what="load without a cast (bf16): whole process, against from_pretrained",
            sample=wall["shmload"] / wall["diffusers"],
            at_most=1.03,
            beside=wall
            | {"difference": wall["shmload"] - wall["diffusers"]}
            | labelled("{}, processor time", rounds.samples("cpu_s")),
        )
    ]


def measure_small(bench: Bench) -> list[Figure]:
    """A tiny pipeline: the time that shmload adds to `from_pretrained`."""
    source = bench.source("small-fp32")
    ways = {way: bench.probe(repeat, way, source) for way in ("shmload", "diffusers")}
    calls = bench.measure(ways, source).samples("call_s")
    nbytes = weights_nbytes(weight_files(source))
    return [
        Figure(
            name="small",
            what=f"a pipeline of {nbytes / 1e6:.1f} MB: time added to from_pretrained",
            sample=calls["shmload"] - calls["diffusers"],
            at_most=0.15,
            beside=calls,
        )
    ]


def repeat(way: str, source: str) -> Numbers:
    """Load a pipeline once, then some times: `call_s` is the median of the repeated loads."""
    load = partial(load_pipeline(way), source)
    load()
    return {"call_s": statistics.median(time_call(load) for _ in range(_SMALL_CALLS))}


# Decoding -----------------------------------------------------------------------------------------


def measure_decode(bench: Bench) -> list[Figure]:
    """Decoding float32 to bfloat16 by workers, against a plain loop: pread, convert, write."""
    source = bench.source("sd15-fp32")
    counts = sorted({1, len(os.sched_getaffinity(0))})
    ways: dict[str, Way] = {"loop": bench.probe(plain_loop, *weight_files(source))}
    ways |= {str(count): partial(warm_and_evict, bench, source, count) for count in counts}
    rounds = bench.measure(ways, source)
    loop = rounds.sample("loop", "bytes_per_s")
    decode = rounds.samples("decode_bytes_per_s")
    return [
        Figure(
            name=f"decode-bf16-{count}",
            what=f"decoding fp32 to bf16, workers: {count}; throughput, against {count} x a plain "
            "loop",
            sample=(decode[str(count)] / loop).scaled(100 / count, "%"),
            at_least=80,
            beside={
                "shmload, workers running": decode[str(count)],
                "plain loop, one process": loop,
                "shmload.warm(), start to end": rounds.sample(str(count), "bytes_per_s"),
            },
        )
        for count in counts
    ]


def warm_and_evict(bench: Bench, source: Path, workers: int | None = None) -> Result:
    try:
        found: Result = bench.ask(warm, source, workers)
        return found
    finally:
        bench.evict()


def plain_loop(*paths: str) -> Numbers:
    """Read, convert to bfloat16 and write whole files in one process, in the simplest way.

    Decoding is compared with this loop. It has no digest and no plan, and reuses its buffers.
    """
    import ml_dtypes
    import numpy as np

    buffer = bytearray(_BLOCK_NBYTES)
    converted = np.empty(_BLOCK_NBYTES // 4, ml_dtypes.bfloat16)
    nbytes = 0
    elapsed_s = 0.0
    for path in paths:
        with open(path, "rb", buffering=0) as shard, _fresh_file() as target:
            source, position = shard.fileno(), 0
            end = os.fstat(source).st_size
            offset = 8 + int.from_bytes(os.pread(source, 8, 0), "little")
            nbytes += end - offset
            began = time.perf_counter()
            while offset < end:
                got = os.preadv(source, [buffer], offset)
                floats = np.frombuffer(buffer, np.float32, got // 4)
                converted[: floats.size] = floats
                written = converted[: floats.size].view(np.uint8).data
                position += os.pwrite(target.fileno(), written, position)
                offset += got
            elapsed_s += time.perf_counter() - began
    return {"bytes_per_s": nbytes / elapsed_s}


def _fresh_file() -> Any:
    """Open a new file in /dev/shm without a name, so that the kernel frees it in any case."""
    return tempfile.TemporaryFile(dir="/dev/shm", buffering=0)


# Floors -------------------------------------------------------------------------------------------


def measure_floors(bench: Bench) -> list[Figure]:
    """This machine's floors: times and throughputs that no loader can beat."""
    files = weight_files(bench.source("sd15-fp32"))
    largest = max(files, key=lambda path: path.stat().st_size)
    starts = {
        "Python starts and ends": "pass",
        "import shmload": "import shmload",
        "import torch": "import torch",
        "import the pipeline's classes": _IMPORTS,
    }
    ways = {what: bench.python(code) for what, code in starts.items()}
    rounds = bench.measure(ways | {"memory": bench.probe(memory_floors, largest)}, largest.parent)
    rates = {name: rounds.sample("memory", name) for name in rounds.results["memory"][0]}
    memory = {name.removesuffix(", bytes_per_s"): sample for name, sample in rates.items()}
    floors = {what: rounds.sample(what, "wall_s") for what in starts} | memory
    return [
        Figure(name=f"floor: {what}", what=what, sample=sample) for what, sample in floors.items()
    ]


def memory_floors(path: str) -> Numbers:
    """Measure throughputs that no loader can beat, over 1 GiB each."""
    import numpy as np

    block = bytearray(_BLOCK_NBYTES)
    pages = slice(None, None, _PAGE_NBYTES)
    source = np.ones(_FLOOR_NBYTES, np.uint8)
    target = np.zeros_like(source)
    target[:] = source
    offsets = range(0, _FLOOR_NBYTES, _BLOCK_NBYTES)

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            for offset in offsets:
                os.preadv(file.fileno(), [block], offset)

    with _fresh_file() as shared, mmap.mmap(-1, _FLOOR_NBYTES) as private:

        def write() -> None:
            for offset in offsets:
                os.pwrite(shared.fileno(), block, offset)

        took_s = {
            "copy memory to memory, pages in use": time_call(partial(np.copyto, target, source)),
            "pread of cached file, 1 MiB at a time": time_call(read),
            "pwrite to fresh pages in /dev/shm": time_call(write),
            "pwrite to the same pages again": time_call(write),
        }
        ones = bytes([1]) * (_FLOOR_NBYTES // _PAGE_NBYTES)
        touch = partial(private.__setitem__, pages, ones)
        took_s["first touch of fresh private pages"] = time_call(touch)
        with mmap.mmap(shared.fileno(), _FLOOR_NBYTES) as mapping:
            # One byte of each page, as the first use of attached weights does.
            touch_shared = partial(mapping.__getitem__, pages)
            took_s["first touch of attached shared pages"] = time_call(touch_shared)
    return {f"{what}, bytes_per_s": _FLOOR_NBYTES / each_s for what, each_s in took_s.items()}


SUITE = Suite(
    measures={
        "attach": measure_attach,
        "first-load": measure_first_load,
        "same-dtype": measure_same_dtype,
        "tensors": measure_tensors,
        "keys": measure_keys,
        "small": measure_small,
        "decode": measure_decode,
        "floors": measure_floors,
    },
    sources=("small-fp32", "tensors-90000", "flux-small", "flux-keys", "sd15-fp32", "sd15-bf16"),
    disk_gb=9,
    shm_gb=3,
    memory_gb=13,
)
