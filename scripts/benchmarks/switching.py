"""What the suite `switch` runs in fresh processes: publish, mix, switch and update, and the peer.

The peer is diffusers in one process, which loads, fuses, quantises and loads again.
"""

import contextlib
import ctypes
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from benchmarks.attach import measure, models_of
from benchmarks.probes import Numbers, private_nbytes, time_call, touch

_DTYPE = "bfloat16"
_SUPPORT = Path(__file__).parents[2] / "tests" / "support"


def quantise(way: str, small: str, source: str) -> Numbers:
    """Load a UNet in int8 by torchao, as `attach.measure` does."""
    import diffusers
    import torch
    from torchao.quantization import Int8WeightOnlyConfig

    import shmload

    given: dict[str, Any] = {
        "subfolder": "unet",
        "quantization_config": diffusers.TorchAoConfig(Int8WeightOnlyConfig()),
    }

    def load(path: str) -> Any:
        if way == "shmload":
            name = "UNet2DConditionModel"
            return shmload.load_model(name, path, dtype=_DTYPE, keep=True, progress=False, **given)
        return diffusers.UNet2DConditionModel.from_pretrained(
            path, torch_dtype=torch.bfloat16, **given
        )

    return measure(load, small, source)


def publish(source: str, lora: str, name: str) -> Numbers:
    """Fuse a LoRA, and publish the pipeline.

    Args:
        source: of the pipeline; it is kept.
        lora: file of the LoRA; empty for none.
        name: of the publication.

    Returns:
        `changed_nbytes` of the tensors that the LoRA has changed; `written_nbytes`;
        `publish_s`.
    """
    import shmload

    pipe = _load("shmload", source)
    if lora:
        _fuse(pipe, lora)
    began = time.perf_counter()
    made = shmload.publish(pipe, name)
    publish_s = time.perf_counter() - began
    return {
        "changed_nbytes": _changed_nbytes(pipe, _load("shmload", source)),
        "written_nbytes": made.nbytes,
        "publish_s": publish_s,
    }


def attach(small: str, name: str) -> Numbers:
    """Load a publication, as `attach.measure` does.

    Returns:
        What that returns, and `copied_nbytes` of the weights, which the process has for itself.
    """
    import shmload

    found = measure(shmload.load_pipeline, small, name)
    pipe = shmload.load_pipeline(name)
    touch(models_of(pipe))
    return found | {"copied_nbytes": _copied_nbytes(pipe)}


def switch_style(way: str, source: str, first: str, second: str) -> Numbers:
    """Go from one LoRA to another and back, twice.

    Returns:
        `switch_s` of the last time; `private_nbytes`, the growth of the process's private memory
        over the second round; `weights_nbytes` of the pipeline, and `copied_nbytes` of them, which
        the process has for itself.
    """
    import shmload

    if way == "Switcher":
        models = {lora: {"source": source, "loras": [lora]} for lora in (first, second)}
        switcher = shmload.Switcher(models, "20GiB", dtype=_DTYPE, progress=False)

        def use(_: Any, lora: str) -> Any:
            with switcher.use(lora) as pipe:
                return pipe

        return _turn(use, first, second)

    if way == "shmload":

        def mix(_: Any, lora: str) -> Any:
            return shmload.mix(source, [lora], dtype=_DTYPE, progress=False)

        return _turn(mix, first, second)

    def change(pipe: Any, lora: str) -> Any:
        if pipe is None:
            pipe = _load(way, source)
        else:
            pipe.unfuse_lora()
            pipe.unload_lora_weights()
        pipe.load_lora_weights(str(Path(lora).parent), weight_name=Path(lora).name)
        pipe.fuse_lora()
        return pipe

    return _turn(change, first, second)


def mix(source: str, lora: str) -> Numbers:
    """Mix one LoRA; return `call_s`, with the imports, if they were not there."""
    import shmload

    return {"call_s": time_call(lambda: shmload.mix(source, [lora], dtype=_DTYPE, progress=False))}


def publish_models(source: str, *names: str) -> None:
    """Publish pipelines that share all with a source but the UNet."""
    import shmload

    for number, name in enumerate(names):
        pipe = _load("shmload", source)
        for parameter in pipe.unet.parameters():
            parameter.data = parameter.data * (number + 2)
        shmload.publish(pipe, name)


def switch_models(way: str, *sources: str) -> Numbers:
    """Go from one model to the next, all resident; by diffusers, load the first one anew.

    Returns:
        `switch_s`, the median; `held_nbytes` in segments, and `union_nbytes` of the weights.
    """
    if way != "shmload":
        pipe = _load(way, sources[0])
        began = time.perf_counter()
        del pipe
        pipe = _load(way, sources[0])
        return {"switch_s": time.perf_counter() - began}
    import shmload

    models = dict(zip(sources, map(_arguments, sources), strict=True))
    switcher = shmload.Switcher(models, budget="20GiB")
    took = []
    weights: dict[str, dict[str, int]] = {}
    for source in sources * 4:
        began = time.perf_counter()
        with switcher.use(source) as pipe:
            took.append(time.perf_counter() - began)
            weights[source] = {
                name: touch([part])
                for name, part in pipe.components.items()
                if part in models_of(pipe)
            }
    first, *others = weights.values()
    held_nbytes = shm_nbytes()
    switcher.close()
    return {
        "switch_s": statistics.median(took[len(sources) :]),
        "held_nbytes": held_nbytes,
        "union_nbytes": sum(first.values()) + sum(each["unet"] for each in others),
    }


def load_models(folder: str) -> Numbers:
    """Load all models of a folder; return `resident_nbytes` of their segments."""
    import shmload

    for path in Path(folder).iterdir():
        _load("shmload", str(path))
    found = (info.nbytes for info in shmload.segments() if info.source.startswith(f"{folder}/"))
    return {"resident_nbytes": sum(found)}


def switch_randomly(folder: str, budget_nbytes: int, switches: int) -> Numbers:
    """Go from one tiny model of a folder to another.

    Returns:
        `other_images`, how many differ from the model's first; `growth_nbytes` of private memory
        over the second half.
    """
    import numpy as np

    import shmload

    sys.path.append(str(_SUPPORT))
    import pipelines

    paths = sorted(map(str, Path(folder).iterdir()))
    models = dict(zip(paths, map(_arguments, paths), strict=True))
    switcher = shmload.Switcher(models, budget=budget_nbytes)
    chance = random.Random(0)
    images: dict[str, Any] = {}
    other_images = before = 0
    for number in range(switches):
        if number == switches // 2:
            before = _own_nbytes()
        path = chance.choice(paths)
        with switcher.use(path) as pipe:
            image = pipelines.run(pipe)
        other_images += not np.array_equal(images.setdefault(path, image), image)
    growth_nbytes = _own_nbytes() - before
    switcher.close()
    return {"other_images": other_images, "growth_nbytes": growth_nbytes}


def update(first: str, second: str) -> Numbers:
    """Update a pipeline from one version of a publication to another.

    Returns:
        `update_s`; `private_nbytes` that it has copied.
    """
    import shmload

    pipe = shmload.load_pipeline(first)
    shmload.update(shmload.load_pipeline(first), first)  # imports what it needs
    touch(models_of(pipe))
    before = _own_nbytes()
    began = time.perf_counter()
    shmload.update(pipe, second)
    update_s = time.perf_counter() - began
    touch(models_of(pipe))
    return {
        "update_s": update_s,
        "private_nbytes": _own_nbytes() - before,
    }


def shm_nbytes(but: Collection[str] = ()) -> int:
    """Return the memory of all segments and parts in bytes, but for those of some names."""
    nbytes = 0
    for entry in os.scandir("/dev/shm"):
        if entry.name.startswith("shmload-") and entry.name not in but:
            with contextlib.suppress(FileNotFoundError):
                nbytes += entry.stat().st_blocks * 512
    return nbytes


def _arguments(source: str) -> Any:
    return source if source.startswith("shm:") else {"source": source, "dtype": _DTYPE}


def _turn(change: Callable[[Any, str], Any], first: str, second: str) -> Numbers:
    pipe = change(change(change(None, first), second), first)
    touch(models_of(pipe))
    before = _own_nbytes()
    for lora in (second, first):
        began = time.perf_counter()
        pipe = change(pipe, lora)
        switch_s = time.perf_counter() - began
        nbytes = touch(models_of(pipe))
    return {
        "switch_s": switch_s,
        "private_nbytes": _own_nbytes() - before,
        "weights_nbytes": nbytes,
        "copied_nbytes": _copied_nbytes(pipe),
    }


def _load(way: str, source: str) -> Any:
    if way == "shmload":
        import shmload

        return shmload.load_pipeline(source, dtype=_DTYPE, keep=True, progress=False)
    import torch
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(source, torch_dtype=torch.bfloat16)


def _fuse(pipe: Any, lora: str) -> None:
    pipe.load_lora_weights(str(Path(lora).parent), weight_name=Path(lora).name)
    pipe.fuse_lora()
    pipe.unload_lora_weights()


def _changed_nbytes(pipe: Any, other: Any) -> int:
    import torch

    return sum(
        tensor.nbytes
        for one, two in zip(models_of(pipe), models_of(other), strict=True)
        for tensor, same in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
        if not torch.equal(tensor, same)
    )


def _copied_nbytes(pipe: Any) -> int:
    """Return how many bytes of the mappings of a pipeline's weights are this process's own."""
    sys.path.append(str(_SUPPORT))
    import mappings

    return int(mappings.copied_nbytes(pipe))


def _own_nbytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or what was freed would count
    return private_nbytes()
