"""Many processes with one pipeline: the figures of `scripts/bench many`.

Times count from the start of the first process, which the environment variable STARTED_AT gives on
the monotonic clock that all processes of a machine share.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Suite, Way, weight_files, weights_nbytes
from benchmarks.figures import Figure, Result, Sample, speed_up
from benchmarks.probes import Clients, Numbers, pss_nbytes, touch

PROCESSES = 8
VIEWERS = 4
MODELS = ("vae", "text_encoder", "unet")
_ITEM_S = 0.05
_ITEMS = 120
# strace: `pread64(7</path/model.safetensors>, ..., 4096, 0) = 4096`.
_READ = re.compile(r"= (\d+)$", re.MULTILINE)
_READING_CALLS = "read,pread64,readv,preadv,preadv2,sendfile,copy_file_range,mmap"

_PLAIN = """
import sys
import torch
from diffusers import DiffusionPipeline
pipe = DiffusionPipeline.from_pretrained(
    sys.argv[1], torch_dtype=torch.bfloat16, safety_checker=None, requires_safety_checker=False
)
print("ANSWER ready", flush=True)
sys.stdin.readline()
for model in (pipe.vae, pipe.text_encoder, pipe.unet):
    for tensor in model.state_dict().values():
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()
print("ANSWER read", flush=True)
sys.stdin.readline()
"""


def measure_ready(bench: Bench) -> list[Figure]:
    """Time until all processes are ready, and the memory that they take."""
    large = bench.source("sd15-fp32")
    ways: dict[str, Way] = {
        f"{label}{size}": partial(_ask, bench, function, source)
        for label, function in (("a job's", job), ("diffusers", plain))
        for size, source in ((", tiny models", bench.source("small-fp32")), ("", large))
    }
    found = bench.measure(ways, large)
    memory = found.samples("pss_nbytes")
    copies = {
        way: _copies(memory[way], memory[f"{way}, tiny models"], large)
        for way in ("a job's", "diffusers")
    }
    return [
        speed_up(
            "many-ready",
            f"{PROCESSES} processes ready: speed-up over {PROCESSES} that call from_pretrained",
            found.samples("ready_s"),
            ours="a job's",
            at_least=5,
        ),
        Figure(
            name="many-memory",
            what=f"memory of all {PROCESSES} (PSS, no interpreters), in copies of the weights",
            sample=copies["a job's"],
            at_most=1.05,
            beside={"diffusers": copies["diffusers"]},
        ),
    ]


def measure_views(bench: Bench) -> list[Figure]:
    """Memory of unchanged programs that load one view directory."""
    large = bench.source("sd15-fp32")
    ways: dict[str, Way] = {
        size: partial(_ask, bench, view, source, VIEWERS)
        for size, source in (("tiny models", bench.source("small-fp32")), ("ready", large))
    }
    found = bench.measure(ways, large)
    memory = found.samples("pss_nbytes")
    return [
        Figure(
            name="many-views",
            what=f"memory of {VIEWERS} unchanged programs over one view directory (PSS, no "
            "interpreters), in copies of the weights",
            sample=_copies(memory["ready"], memory["tiny models"], large),
            at_most=1.05,
            beside=found.samples("ready_s"),
        )
    ]


def _copies(memory: Sample, interpreters: Sample, source: Path) -> Sample:
    """Return the memory of processes without their own, which the same with tiny models take."""
    copy_mb = weights_nbytes(_shards(source)) / 2 / 1e6  # bfloat16
    return (memory - interpreters).scaled(1 / copy_mb, "x")


def measure_reads(bench: Bench) -> list[Figure]:
    """Bytes that all processes of a job read of the source."""
    if not shutil.which("strace"):
        bench.announce("left out: strace is not installed")
        return []
    source = bench.source("sd15-fp32")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        watched = [option for path in _shards(source) for option in ("-P", str(path))]
        command = ["strace", "-f", "-qq", "-e", f"trace={_READING_CALLS}", *watched]
        _ask(bench, job, source, prefix=(*command, "-o", str(trace)))
        text = trace.read_text()
    if "mmap(" in text:
        raise RuntimeError("the source was mapped; reads through a mapping cannot be counted")
    nbytes = sum(int(match) for match in _READ.findall(text))
    return [
        Figure(
            name="many-reads",
            what=f"bytes read of the source by all {PROCESSES}, as a share of its size",
            sample=Sample((nbytes / weights_nbytes(_shards(source)),), "times"),
            at_most=1.01,
        )
    ]


def measure_one_more(bench: Bench) -> list[Figure]:
    """Start of one more process in a running job, and the time lost to a killed process."""
    source = bench.source("sd15-fp32")
    found = bench.measure({"job": partial(_ask, bench, one_more, source)}, source)
    return [
        Figure(
            name="many-one-more",
            what="one more process in a running job: time to its first item",
            sample=found.sample("job", "start_s").scaled(1e3, "ms"),
            at_most=500,
        ),
        Figure(
            name="many-killed",
            what="time lost to a killed process, besides its own item",
            sample=found.sample("job", "lost_s").scaled(1e3, "ms"),
            at_most=1000,
        ),
    ]


def _shards(source: Path) -> list[Path]:
    """Return the weight files of the loaded models."""
    return [path for path in weight_files(source) if path.parent.name in MODELS]


def _ask(
    bench: Bench,
    function: Callable[[str, int], Numbers],
    source: Path,
    count: int = PROCESSES,
    prefix: tuple[str, ...] = (),
) -> Result:
    started = str(time.monotonic())
    found: Result = bench.ask(function, source, count, prefix=prefix, STARTED_AT=started)
    return found


# What runs in fresh processes ---------------------------------------------------------------------


def plain(source: str, count: int, code: str = _PLAIN) -> Numbers:
    """Load a pipeline in `count` processes with diffusers alone.

    Returns:
        `ready_s`, when all processes have the pipeline; `pss_nbytes` of all together, after each
        has read all weights.
    """
    with Clients([sys.executable, "-W", "ignore", "-c", code, source], count) as clients:
        clients.hear()
        ready_s = _since_start()
        clients.ask()
        return {"ready_s": ready_s, "pss_nbytes": pss_nbytes(clients.pids)}


def view(source: str, count: int) -> Numbers:
    """Load a view directory in `count` processes that know nothing of shmload.

    Returns:
        What `plain` does; `ready_s` is without the time to make the directory.
    """
    import shmload

    with tempfile.TemporaryDirectory() as folder:
        made = shmload.view_directory(
            source, os.path.join(folder, "view"), components=MODELS, dtype="bfloat16"
        )
        os.environ["STARTED_AT"] = str(time.monotonic())
        try:
            without = f"import sys; sys.modules['shmload'] = None\n{_PLAIN}"
            return plain(str(made), count, without)
        finally:
            shmload.evict(source)


def job(source: str, count: int) -> Numbers:
    """Load it in the processes of a job; return the same numbers."""
    with _job(source, count) as made, tempfile.TemporaryDirectory() as folder:
        met = list(made.map(_meet, [(folder, count)] * count))
        ready_s = _since_start()
        pids = {pid for pids in met for pid in pids}
        with tempfile.TemporaryDirectory() as again:
            list(made.map(_read_all, [(again, count)] * count))
        # The fork server and this process count too.
        return {"ready_s": ready_s, "pss_nbytes": pss_nbytes([*pids, os.getpid()])}


def one_more(source: str, count: int) -> Numbers:
    """Kill one process of a running job.

    Returns:
        `start_s`, from the kill to the first item of the replacement process; `lost_s`, how much
        longer the whole job took, without the repeated item.
    """
    with _job(source, count) as made, tempfile.TemporaryDirectory() as folder:
        known = {pid for pids in made.map(_meet, [(folder, count)] * count) for pid in pids}
        undisturbed_s = _timed(made, [("", number) for number in range(_ITEMS)])[0]
        mark = os.path.join(folder, "killed")
        took_s, found = _timed(made, [(mark, number) for number in range(_ITEMS)])
        killed_at = float(Path(mark).read_text())
    newcomer = min(at for pid, at in found if pid not in known)
    return {
        "start_s": newcomer - killed_at,
        "lost_s": max(0.0, took_s - undisturbed_s - _ITEM_S),
    }


def _job(source: str, count: int) -> Any:
    from shmload.integrations import dataprep

    return dataprep.Job(source, components=MODELS, dtype="bfloat16", procs=count)


def _timed(job: Any, items: list[tuple[str, int]]) -> tuple[float, list[tuple[int, float]]]:
    began = time.monotonic()
    found = list(job.map(_wait, items))
    return time.monotonic() - began, found


def _wait(pipe: Any, item: tuple[str, int]) -> tuple[int, float]:
    """Sleep for an item; at one item, the first time, kill the process half-way."""
    mark, number = item
    if mark and number == _ITEMS // 2 and not os.path.exists(mark):
        time.sleep(_ITEM_S / 2)
        Path(mark).write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    arrived_at = time.monotonic()
    time.sleep(_ITEM_S)
    return os.getpid(), arrived_at


def _meet(pipe: Any, item: tuple[str, int]) -> tuple[int, int]:
    """Wait until `count` processes are here; return this process's pid and its parent's."""
    folder, count = item
    Path(folder, str(os.getpid())).touch()
    while len([name for name in os.listdir(folder) if name.isdigit()]) < count:
        time.sleep(0.001)
    return os.getpid(), os.getppid()


def _read_all(pipe: Any, item: tuple[str, int]) -> None:
    """Read a byte of each page of each weight, in each process."""
    _meet(pipe, item)
    touch(getattr(pipe, name) for name in MODELS)


def _since_start() -> float:
    return time.monotonic() - float(os.environ["STARTED_AT"])


SUITE = Suite(
    measures={
        "ready": measure_ready,
        "reads": measure_reads,
        "one-more": measure_one_more,
        "views": measure_views,
    },
    sources=("small-fp32", "sd15-fp32"),
    disk_gb=6,
    shm_gb=3,
    # diffusers alone needs a copy of the weights and an interpreter per process.
    memory_gb=PROCESSES * (2.14 + 0.4),
)
