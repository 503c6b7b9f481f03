"""Checkpoints of many tensors: their figures in `scripts/bench load`."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from pathlib import Path

from benchmarks.attach import Attach
from benchmarks.bench import Bench
from benchmarks.checkpoints import TENSOR_COUNTS
from benchmarks.figures import Figure, Sample
from benchmarks.probes import Numbers, time_call


def measure_tensors(bench: Bench) -> list[Figure]:
    """The time per tensor, with tensors too small for their bytes to matter."""
    folder = bench.source("tensors-90000")
    files = [folder / f"{count}.safetensors" for count in TENSOR_COUNTS]
    rounds = bench.measure({"tensors": bench.probe(tensors, *files)}, folder)
    least, many, most = TENSOR_COUNTS

    def took(count: int, names: Sequence[str]) -> Sample:
        return reduce(add, (rounds.sample("tensors", f"{count} {name}") for name in names))

    def figure(name: str, what: str, count: int, names: Sequence[str], limit_s: float) -> Figure:
        others = {"plan() alone": "plan_s", "safetensors' load_file": "load_file_s"}
        return Figure(
            name=name,
            what=what,
            sample=took(count, names),
            at_most=limit_s,
            beside={f"{n:,}, each": took(n, names).scaled(1e6 / n, "us") for n in TENSOR_COUNTS}
            | {label: took(count, (other,)) for label, other in others.items()},
        )

    def linear(name: str, what: str, names: Sequence[str]) -> Figure:
        return Figure(
            name=name,
            what=f"{what}: time per tensor with {most:,} tensors, against {least:,}",
            sample=(took(most, names) / took(least, names)).scaled(least / most),
            at_most=1.25,
        )

    cast, attached = ("cast_s",), ("plan_s", "attach_s")
    of_many = f"load_state_dict of {many:,} tensors of 1 KiB, fp32 to bf16"
    by_keys = f"{most:,} resident tensors: plan, and load_state_dict by their keys"
    return [
        figure("tensors-cast", of_many, many, cast, 1),
        linear("tensors-linear", "the cast", cast),
        figure("keys", by_keys, most, attached, 1.5),
        linear("keys-linear", "the same", attached),
    ]


def tensors(*paths: str) -> Numbers:
    """Load checkpoints of many tensors; a result's name begins with the file's stem.

    Returns:
        For each file, each a median of three: `cast_s` to bfloat16, `plan_s` of `plan`, `attach_s`
        of a resident segment, and `load_file_s` of safetensors.
    """
    import safetensors.torch

    import shmload

    def attached_s(path: str) -> float:
        """Make a segment, and time attaching it."""
        load = partial(shmload.load_state_dict, path, keep=True)
        load()
        elapsed_s = time_call(load)
        shmload.evict(path)
        return elapsed_s

    found: Numbers = {}
    for path in (paths[0], *paths):  # the first file twice: its first round pays for imports
        calls: dict[str, Callable[[], object]] = {
            "plan_s": partial(shmload.plan, path, dtype="bfloat16"),
            "cast_s": partial(shmload.load_state_dict, path, "bfloat16"),
            "load_file_s": partial(safetensors.torch.load_file, path),
        }
        times = {name: [time_call(call) for _ in range(3)] for name, call in calls.items()}
        times["attach_s"] = [attached_s(path) for _ in range(3)]
        found |= {f"{Path(path).stem} {name}": statistics.median(t) for name, t in times.items()}
    return found


def measure_keys(bench: Bench) -> list[Figure]:
    """`load_model` of a resident model with as many keys as the largest models have."""
    small, source = (bench.source(name) / "transformer" for name in ("flux-small", "flux-keys"))
    attach = Attach(bench, source, "flux", small)
    rounds = attach.rounds(
        without=attach.by_shmload(SHMLOAD_REMEMBER="0"), diffusers=attach.by("diffusers")
    )
    calls = rounds.samples("call_s")
    calls["shmload, with SHMLOAD_REMEMBER=0"] = calls.pop("without")
    count = int(rounds.sample("shmload", "keys").median)
    speed_up = calls["diffusers"] / calls["shmload"]
    return [
        Figure(
            name="keys-model",
            what=f"load_model of a resident model with {count:,} keys",
            sample=calls["shmload"],
            at_most=1.5,
            beside={"speed-up over from_pretrained": speed_up} | calls,
        )
    ]
