"""What the judge costs: the figures of `scripts/bench judges`, on tiny pipelines.

It runs alone on the machine, or the judges wait for an idle one. Each load is made once: what a
judge has found stays.
"""

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Self

from proc import pids_with, stat_of

from benchmarks.bench import Bench, Suite
from benchmarks.figures import Figure, Sample, labelled
from benchmarks.probes import Numbers, time_call
from shmload._host.procfs import command_of

_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
_TOGETHER = 24
_CLASSES_TOGETHER = 3
_LOOK_S = 0.05
_PROGRAM = "from shmload._building.judging import main"


def measure_at_once(bench: Bench) -> list[Figure]:
    """Processes with caches of their own that load new classes together: the most judges."""
    sources = _sources(bench)[:_CLASSES_TOGETHER]
    count = 2 if bench.is_quick else _TOGETHER
    with _Judges(bench.runtime) as judges, tempfile.TemporaryDirectory() as caches:

        def load_new(number: int) -> None:
            cache = Path(caches, str(number))
            cache.mkdir()
            own = {"SHMLOAD_CACHE_DIR": str(cache), "SHMLOAD_SKELETONS": "1"}
            bench.ask(load, sources[number % len(sources)], "bfloat16", **own)

        with ThreadPoolExecutor(count) as pool:
            list(pool.map(load_new, range(count)))
        bench.wait_for_skeletons()
    return [
        Figure(
            name="judges-at-once",
            what=f"{count} processes with caches of their own load new classes: judges at once",
            sample=Sample((float(judges.most_at_once),)),
            at_most=1,
        )
    ]


def measure_costs(bench: Bench) -> list[Figure]:
    """Loads of all pipelines in several dtypes, one after the other, against no skeletons."""
    took: dict[str, list[float]] = {"with judges": [], "without": []}
    with _Judges(bench.runtime) as judges, tempfile.TemporaryDirectory() as cache:
        for source in _sources(bench):
            for dtype in _DTYPES[:1] if bench.is_quick else _DTYPES:
                for way, switch in (("with judges", "1"), ("without", "0")):
                    own = {"SHMLOAD_CACHE_DIR": cache, "SHMLOAD_SKELETONS": switch}
                    took[way].append(bench.ask(load, source, dtype, **own)["call_s"])
        while_loading_s = judges.cpu_s
        bench.wait_for_skeletons()
    calls = {way: Sample(tuple(each), "s") for way, each in took.items()}
    total = {way: Sample((sum(each),), "s") for way, each in took.items()}
    what = f"{len(took['without'])} loads of tiny pipelines"
    return [
        Figure(
            name="judges-slower",
            what=f"{what}, against the same without skeletons",
            sample=calls["with judges"] / calls["without"],
            at_most=1.1,
            beside=labelled("{}, in all", total)
            | {"the ratio, in all": total["with judges"] / total["without"]},
        ),
        Figure(
            name="judges-cpu",
            what=f"{what}: processor time of the judges, at idle priority",
            sample=Sample((judges.cpu_s,), "s"),
            at_most=60,
            beside={"of it while the loads ran": Sample((while_loading_s,), "s")},
        ),
    ]


def _sources(bench: Bench) -> list[Path]:
    return sorted(bench.source("tiny-pipelines").iterdir())


def load(source: str, dtype: str) -> Numbers:
    """Load a pipeline after all imports; return `call_s`."""
    import diffusers  # noqa: F401 import it outside the measured time
    import torch  # noqa: F401
    import transformers  # noqa: F401

    import shmload

    return {"call_s": time_call(partial(shmload.load_pipeline, source, dtype=dtype))}


class _Judges(threading.Thread):
    """Looks at the judges of one folder for sockets and queues, while its block runs."""

    def __init__(self, runtime: Path) -> None:
        super().__init__()
        self.most_at_once = 0
        self._runtime = os.fsencode(f"XDG_RUNTIME_DIR={runtime}\0")
        self._cpu_s: dict[int, float] = {}
        self._ending = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join()

    @property
    def cpu_s(self) -> float:
        """Processor time of the judges and of their processes up to now."""
        return sum(self._cpu_s.values())

    def run(self) -> None:
        while not self._ending.wait(_LOOK_S):
            mine = {pid: stat_of(pid) for pid in pids_with(self._runtime, file="environ")}
            found = {pid: stat for pid, stat in mine.items() if stat and _is_judge(pid)}
            # Its examiners have its command line, too.
            judges = {pid: s.cpu_s for pid, s in found.items() if s.parent not in found}
            self._cpu_s |= judges
            self.most_at_once = max(self.most_at_once, len(judges))


def _is_judge(pid: int) -> bool:
    return any(_PROGRAM in word for word in command_of(pid))


SUITE = Suite(
    measures={"at-once": measure_at_once, "costs": measure_costs},
    sources=("tiny-pipelines",),
    disk_gb=1,
    shm_gb=1,
    memory_gb=8,
)
