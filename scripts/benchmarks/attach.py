"""Loads of weights that are in memory: what they take, by shmload and by the libraries.

Each runs in a fresh process that has loaded a small source of the same kind before, so that no
clock counts an import.
"""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Way
from benchmarks.figures import Rounds, Sample
from benchmarks.probes import Numbers, private_nbytes, touch

Load = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Attach:
    """Loads of one source.

    Args:
        bench: the context.
        source: to load.
        kind: one of `_LOADERS`.
        small: what a process loads before.
        resident: to make resident, if it is not the source.
    """

    bench: Bench
    source: Path
    kind: str = "pipeline"
    small: Path | None = None
    resident: Path | None = None

    def by(self, way: str, **variables: str) -> Way:
        """Return what loads in a fresh process; the weights are not made resident for it."""
        small = self.small or self.bench.source("small-fp32")
        return self.bench.probe(attach, self.kind, way, small, self.source, **variables)

    def by_shmload(self, **variables: str) -> Way:
        """Return what makes the weights resident and then loads in a fresh process."""
        run = self.by("shmload", **variables)
        return partial(self.bench.while_resident, self.resident or self.source, run)

    def rounds(self, **others: Way) -> Rounds:
        """Measure `shmload`, an attach of what an earlier load has built, and other ways."""
        ours = self.by_shmload()
        ours()  # keeps what it builds
        rounds = self.bench.measure({"shmload": ours, **others}, self.source)
        self.bench.evict()
        return rounds


def touched(rounds: Rounds) -> dict[str, Sample]:
    """Return the time of the call and of the touch after it, by way."""
    return {
        way: called + rounds.sample(way, "touch_s")
        for way, called in rounds.samples("call_s").items()
    }


def attach(kind: str, way: str, small: str, source: str) -> Numbers:
    """Load a source in bfloat16 in a process that has loaded a small one before.

    Args:
        kind: one of `_LOADERS`.
        way: `shmload`, or another for the libraries alone.
        small: the small source.
        source: to load.

    Returns:
        What `measure` does.
    """
    return measure(_LOADERS[kind](way), small, source)


def measure(load: Load, small: str, source: str) -> Numbers:
    """Measure a load in a process that loads a small source before.

    Args:
        load: what loads.
        small: the small source.
        source: to load.

    Returns:
        `call_s` of the call; `touch_s` of reading a byte of each page of each weight after it;
        `private_nbytes`, the growth of the process's private memory over both; `weights_nbytes`;
        `keys`, how many tensors the models have.
    """
    load(small)
    gc.collect()
    before = private_nbytes()
    began = time.perf_counter()
    models = models_of(load(source))
    called = time.perf_counter()
    nbytes = touch(models)
    return {
        "call_s": called - began,
        "touch_s": time.perf_counter() - called,
        "private_nbytes": private_nbytes() - before,
        "weights_nbytes": nbytes,
        "keys": sum(len(model.state_dict()) for model in models),
    }


def models_of(made: Any) -> list[Any]:
    """Return the models of a pipeline, or the model alone."""
    import torch

    parts = [made] if isinstance(made, torch.nn.Module) else made.components.values()
    return [part for part in parts if isinstance(part, torch.nn.Module)]


def load_pipeline(way: str) -> Load:
    """Return what loads a pipeline: of a directory, or of the file beside a folder `config`."""
    import torch
    from diffusers import DiffusionPipeline, StableDiffusionXLPipeline

    import shmload

    def load(source: str) -> Any:
        file, config = os.path.join(source, "model.safetensors"), os.path.join(source, "config")
        given: dict[str, Any] = {"config": config} if os.path.isdir(config) else {}
        if way == "shmload":
            path = file if given else source
            return shmload.load_pipeline(path, dtype=torch.bfloat16, keep=True, **given)
        if given:
            return StableDiffusionXLPipeline.from_single_file(
                file, torch_dtype=torch.bfloat16, **given
            )
        return DiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)

    return load


def load_flux(way: str) -> Load:
    """Return what loads a transformer of Flux's class from its directory."""
    import torch
    from diffusers import FluxTransformer2DModel

    import shmload

    if way == "shmload":
        return partial(shmload.load_model, FluxTransformer2DModel, dtype=torch.bfloat16, keep=True)
    return partial(FluxTransformer2DModel.from_pretrained, torch_dtype=torch.bfloat16)


def load_gguf(way: str) -> Load:
    """Return what loads a quantised transformer of Flux's class from `model.gguf`."""
    import torch
    from diffusers import FluxTransformer2DModel, GGUFQuantizationConfig

    import shmload

    def load(source: str) -> Any:
        path = os.path.join(source, "model.gguf")
        given: dict[str, Any] = {
            "config": os.path.join(source, "config"),
            "quantization_config": GGUFQuantizationConfig(compute_dtype=torch.bfloat16),
        }
        if way == "shmload":
            model_class = "FluxTransformer2DModel"
            return shmload.load_model(model_class, path, dtype=torch.bfloat16, keep=True, **given)
        return FluxTransformer2DModel.from_single_file(path, torch_dtype=torch.bfloat16, **given)

    return load


_LOADERS: dict[str, Callable[[str], Load]] = {
    "pipeline": load_pipeline,
    "flux": load_flux,
    "gguf": load_gguf,
}
"""Returns what loads a source, by its kind; given the way."""
