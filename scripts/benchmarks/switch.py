"""Finished pipelines as shared things: the figures of `scripts/bench switch`.

Each is measured beside diffusers in one process, which loads, fuses, quantises and loads again.
"""

import contextlib
import dataclasses
import functools
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import shmload
from benchmarks import attach, switching
from benchmarks.bench import Bench, Suite, Way
from benchmarks.figures import Figure, Result, Rounds, Sample, sample_of, speed_up
from benchmarks.load import FROM_PRETRAINED

_MIX = """\
import shmload
shmload.mix({source!r}, [{lora!r}], dtype="bfloat16", progress=False)
"""
_FUSE = """\
import torch
from diffusers import StableDiffusionPipeline
pipe = StableDiffusionPipeline.from_pretrained({source!r}, torch_dtype=torch.bfloat16)
pipe.load_lora_weights({folder!r}, weight_name={name!r})
pipe.fuse_lora()
"""
_SIZES = "sd15", "sdxl"
_LOOK_S = 0.002
_RANDOM_TIMEOUT_S = 1800


def measure_quantised(bench: Bench) -> list[Figure]:
    """A quantised UNet in the second process: the call, and private memory."""
    if importlib.util.find_spec("torchao") is None:
        bench.announce("left out: torchao is not installed")
        return []
    source, small = bench.source("sd15-bf16"), bench.source("small-fp32")
    ways = {
        way: bench.probe(switching.quantise, way, small, source) for way in ("shmload", "diffusers")
    }
    with _all_removed(bench, source, small):
        rounds = bench.measure(ways, source)
    calls = rounds.samples("call_s")
    return [
        speed_up(
            "quantised",
            "int8 by torchao, the second process: the call, speed-up over the library",
            calls,
            at_least=10,
        ),
        _private("quantised-memory", "the same: private memory as a share", rounds, 2),
    ]


def measure_publish(bench: Bench, size: str = _SIZES[0]) -> list[Figure]:
    """Publish after `fuse_lora`: what is written for what has changed."""
    source, lora = bench.source(f"{size}-bf16"), _lora(bench, "a", size)
    name = _publication(source)
    with _all_removed(bench, source):
        rounds = bench.measure(
            {"shmload": bench.probe(switching.publish, source, lora, name)}, source
        )
    written = rounds.sample("shmload", "written_nbytes")
    changed = rounds.sample("shmload", "changed_nbytes")
    return [
        Figure(
            name=f"publish{_mark(size)}",
            what=f"{_said(size)}publish after fuse_lora: bytes written, of the bytes that changed",
            sample=written / changed,
            at_most=1.02,
            beside={
                "written": written,
                "changed": changed,
                "publish()": rounds.sample("shmload", "publish_s"),
            },
        )
    ]


def measure_attach(bench: Bench, size: str = _SIZES[0]) -> list[Figure]:
    """Attach a published pipeline in another process, beside an attach of its base."""
    source, small = bench.source(f"{size}-bf16"), bench.source("small-fp32")
    names = [_publication(each) for each in (small, source)]
    with _all_removed(bench, source, small):
        bench.ask(switching.publish, small, "", names[0])
        bench.ask(switching.publish, source, _lora(bench, "a", size), names[1])
        ways = {
            "published": bench.probe(switching.attach, *(f"shm:{name}" for name in names)),
            "base": bench.probe(attach.attach, "pipeline", "shmload", small, source),
        }
        ways["base"]()  # keeps what it builds
        rounds = bench.measure(ways, source)
    calls = rounds.samples("call_s")
    return [
        Figure(
            name=f"attach-published{_mark(size)}",
            what=f"{_said(size)}attach a published pipeline: time, of its base",
            sample=calls["published"] / calls["base"],
            at_most=1.3,
            beside=calls,
        ),
        _copied(f"attach-copied{_mark(size)}", rounds, "published"),
        _private(
            f"attach-memory{_mark(size)}",
            "the same: private memory as a share",
            rounds,
            2,
            "published",
        ),
    ]


def measure_style(bench: Bench) -> list[Figure]:
    """From one LoRA to another in a process, the second time."""
    source = bench.source("sd15-fp32")
    loras = [_lora(bench, name) for name in "ab"]
    ways = {
        way: bench.probe(switching.switch_style, way, source, *loras)
        for way in ("Switcher", "shmload", "diffusers")
    }
    with _all_removed(bench, source):
        rounds = bench.measure(ways, source)
    return [
        speed_up(
            "style",
            "another LoRA, the second time: speed-up over unfuse, unload, load and fuse",
            rounds.samples("switch_s"),
            at_least=5,
            ours="Switcher",
        ),
        speed_up(
            "style-mix",
            "the same by `mix`, which builds the pipeline again",
            {way: rounds.sample(way, "switch_s") for way in ("shmload", "diffusers")},
            at_least=1,
        ),
        _copied("style-copied", rounds),
        _private("style-memory", "the same: growth of private memory as a share", rounds),
    ]


def measure_mix(bench: Bench) -> list[Figure]:
    """`mix` of one LoRA with nothing in memory: the whole process."""
    source, lora = bench.source("sd15-fp32"), _lora(bench, "a")
    mix = _MIX.format(source=str(source), lora=str(lora))
    fuse = _FUSE.format(source=str(source), folder=str(lora.parent), name=lora.name)

    def first() -> Result:
        with _all_removed(bench, source):
            return bench.python(mix)()

    def over_base() -> Result:
        with _all_removed(bench, source):
            bench.warm(source)
            return bench.python(mix)()

    ways: dict[str, Way] = {
        "shmload": first,
        "shmload, its base in memory": over_base,
        "diffusers": bench.python(fuse),
        "diffusers, without the LoRA": bench.python(FROM_PRETRAINED, source),
    }
    walls = bench.measure(ways, source).samples("wall_s")
    return [
        Figure(
            name="mix",
            what="mix of one LoRA, nothing in memory: time of the whole process, of load and fuse",
            sample=walls["shmload"] / walls["diffusers"],
            at_most=1,
            beside=walls,
        )
    ]


def measure_models(bench: Bench, size: str = _SIZES[0]) -> list[Figure]:
    """Three resident models that differ in their UNets."""
    source = bench.source(f"{size}-bf16")
    names = [f"{_publication(source)}-{letter}" for letter in "bc"]
    with _all_removed(bench, source):
        bench.ask(switching.publish_models, source, *names)
        sources = (source, *(f"shm:{name}" for name in names))
        ways = {
            way: bench.probe(switching.switch_models, way, *sources)
            for way in ("shmload", "diffusers")
        }
        rounds = bench.measure(ways, source)
    took = rounds.samples("switch_s")
    held, union = (rounds.sample("shmload", name) for name in ("held_nbytes", "union_nbytes"))
    return [
        speed_up(
            f"models{_mark(size)}",
            f"{_said(size)}switch between three resident models: speed-up over loading",
            took,
            at_least=20,
        ),
        Figure(f"models-time{_mark(size)}", "the same: time", took["shmload"], at_most=0.15),
        Figure(
            name=f"models-union{_mark(size)}",
            what=f"{_said(size)}three models that share text encoder and VAE: bytes, of the union",
            sample=held / union,
            at_most=1.01,
            beside={"held": held, "union": union},
        ),
    ]


def measure_random(bench: Bench) -> list[Figure]:
    """Random switches under a budget of 60 %, looked at from outside."""
    switches = 20 if bench.is_quick else 500
    source = bench.source("tiny-models")
    with _all_removed(bench, source):
        budget = bench.ask(switching.load_models, source)["resident_nbytes"] * 6 // 10
        bench.evict()
        with _Sampler() as sampler:
            patient = dataclasses.replace(bench, timeout_s=_RANDOM_TIMEOUT_S)
            found = patient.ask(switching.switch_randomly, source, budget, switches)
    return [
        Figure(
            name="random-budget",
            what=f"{switches} random switches in a budget of 60 %: most bytes held, of the budget",
            sample=Sample((sampler.most_nbytes / budget,), "x"),
            at_most=1,
            beside={"looks": Sample((sampler.looks,))},
        ),
        Figure(
            name="random-images",
            what="the same: images that differ from their model's first",
            sample=Sample((found["other_images"],)),
            at_most=0,
        ),
        Figure(
            name="random-growth",
            what="the same: growth of private memory over the second half",
            sample=sample_of((found,), "growth_nbytes"),
            at_most=1,
        ),
    ]


def measure_update(bench: Bench, size: str = _SIZES[0]) -> list[Figure]:
    """Update a pipeline; a LoRA has changed 5 % of the weights of Stable Diffusion 1.5."""
    source = bench.source(f"{size}-bf16")
    name = _publication(source)
    with _all_removed(bench, source):
        bench.ask(switching.publish, source, "", name)
        made = bench.ask(switching.publish, source, _lora(bench, "a", size), name)
        run = bench.probe(switching.update, f"shm:{name}@1", f"shm:{name}@2")
        rounds = bench.measure({"shmload": run}, source)
    changed = made["changed_nbytes"]
    copied = rounds.sample("shmload", "private_nbytes")
    return [
        Figure(
            name=f"update{_mark(size)}",
            what=f"{_said(size)}update of a pipeline, a LoRA has changed it: time",
            sample=rounds.sample("shmload", "update_s"),
            at_most=0.1,
        ),
        Figure(
            name=f"update-written{_mark(size)}",
            what="the same: bytes written and copied, of the bytes that changed",
            sample=Sample(
                tuple((made["written_nbytes"] + each * 1e6) / changed for each in copied.values),
                "x",
            ),
            at_most=1.05,
            beside={"changed": sample_of((made,), "changed_nbytes"), "copied": copied},
        ),
    ]


class _Sampler:
    """Looks at the size of what the block adds to /dev/shm, in a thread beside it."""

    def __init__(self) -> None:
        self.looks = 0
        self.most_nbytes = 0
        self._before = set(os.listdir("/dev/shm"))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_on)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.looks += 1
            self.most_nbytes = max(self.most_nbytes, switching.shm_nbytes(self._before))


SUITE = Suite(
    measures={
        "quantised": measure_quantised,
        "publish": measure_publish,
        "attach": measure_attach,
        "style": measure_style,
        "mix": measure_mix,
        "models": measure_models,
        "random": measure_random,
        "update": measure_update,
        "publish-sdxl": functools.partial(measure_publish, size="sdxl"),
        "attach-sdxl": functools.partial(measure_attach, size="sdxl"),
        "models-sdxl": functools.partial(measure_models, size="sdxl"),
        "update-sdxl": functools.partial(measure_update, size="sdxl"),
    },
    sources=(
        *("small-fp32", "tiny-models", "sd15-fp32", "sd15-bf16", "sd15-loras"),
        *("sdxl-bf16", "sdxl-loras"),
    ),
    disk_gb=12,
    shm_gb=9,
    memory_gb=18,
)


def _private(
    name: str, what: str, rounds: Rounds, at_most: float | None = None, ours: str = "shmload"
) -> Figure:
    """Return private memory as a share of the weights."""
    private = rounds.samples("private_nbytes")
    weights = rounds.sample(ours, "weights_nbytes")
    return Figure(
        name=name,
        what=what,
        sample=(private[ours] / weights).scaled(100, "%"),
        at_most=at_most,
        beside={**private, "weights": weights},
    )


def _copied(name: str, rounds: Rounds, ours: str = "shmload") -> Figure:
    copied = rounds.sample(ours, "copied_nbytes")
    return Figure(name, "the same: private copies of weights", copied, at_most=0)


def _lora(bench: Bench, name: str, size: str = _SIZES[0]) -> Path:
    return bench.source(f"{size}-loras") / f"{name}.safetensors"


def _mark(size: str) -> str:
    return "" if size == _SIZES[0] else f"-{size}"


def _said(size: str) -> str:
    return "" if size == _SIZES[0] else f"{size}: "


def _publication(source: Path) -> str:
    """Return the name under which this suite publishes a source."""
    return f"{source.name}.bench"


@contextlib.contextmanager
def _all_removed(bench: Bench, *sources: Path) -> Iterator[None]:
    """Remove what the block publishes of some sources, and what it makes resident."""
    try:
        yield
    finally:
        prefixes = tuple(f"shm:{source.name}." for source in sources)
        for info in shmload.segments():
            if info.source.startswith(prefixes):
                shmload.evict(info.name)
        bench.evict()
