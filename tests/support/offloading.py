"""For programs that offload: the stand-in device, a pipeline, and where its weights lie.

import offloading as o        # in a program of its own: it changes torch
pipe = o.load(source)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import stand_in
import torch

import shmload
from shmload._building.mapped import plain_tensors
from shmload._host.shm import shm_unlink
from shmload._segments.names import segment_names

stand_in.install()
DEVICE = torch.device(stand_in.NAME)


def load(source, **kwargs):
    """Load a resident pipeline without bars."""
    pipe = shmload.load_pipeline(source, **{"keep": True, "progress": False} | kwargs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def models(pipe):
    """Return the models of a pipeline by name."""
    return {name: each for name, each in pipe.components.items() if is_model(each)}


def is_model(component):
    return isinstance(component, torch.nn.Module)


def values(pipe):
    """Return copies of all weights on the host, by component and name."""
    return {
        (name, key): tensor.cpu().clone()
        for name, model in models(pipe).items()
        for key, tensor in model.state_dict().items()
    }


def require_equal(pipe, wanted):
    """Check that all weights have the bytes that they had."""
    found = values(pipe)
    assert found.keys() == wanted.keys()
    different = [key for key, each in wanted.items() if not torch.equal(found[key], each)]
    assert not different, different


def outside(model):
    """Return the names of the parameters on the host that lie in no segment."""
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file if "/dev/shm/shmload-" in line]
    spans = [(int(begin, 16), int(end, 16)) for begin, end in ranges]
    return [
        name
        for name, each in model.named_parameters()
        if each.is_cpu
        and not all(any(a <= part.data_ptr() < b for a, b in spans) for part in plain_tensors(each))
    ]


def all_outside(pipe):
    """As `outside`, for all models of a pipeline."""
    return [f"{name}.{key}" for name, model in models(pipe).items() for key in outside(model)]


def nbytes(pipe, names=None):
    """Return the size of parameters in bytes: of those with the names of `all_outside`, or all."""
    return sum(
        each.nbytes
        for name, model in models(pipe).items()
        for key, each in model.named_parameters()
        if names is None or f"{name}.{key}" in names
    )


def from_device():
    """Return how many bytes were copied from the device."""
    return stand_in.counts().from_device


def unlink_all():
    """Remove the names of all segments, used or not."""
    for name in segment_names():
        shm_unlink(name)


def remove_hooks(pipe):
    """Take accelerate's hooks away, and have their weights back in the modules."""
    from accelerate.hooks import remove_hook_from_module

    for model in models(pipe).values():
        remove_hook_from_module(model, recurse=True)


def generate(pipe):
    """Make a small picture."""
    pipe("a lighthouse", num_inference_steps=1, height=64, width=64, output_type="np")


# The libraries' calls -----------------------------------------------------------------------------


def _visit(pipe):
    pipe.to(DEVICE)
    generate(pipe)
    pipe.to("cpu")


def _visit_by_modules(pipe):
    for model in models(pipe).values():
        model.to(DEVICE)
    generate(pipe)
    for model in models(pipe).values():
        model.cpu()


def _offload_in_groups(pipe, **kwargs):
    pipe.enable_group_offload(onload_device=DEVICE, **kwargs)


def _offload_by_manager(pipe):
    from diffusers import ComponentsManager

    pipe.manager = ComponentsManager()
    for name, model in models(pipe).items():
        pipe.manager.add(name, model)
    # Room for one model.
    largest = max(model.get_memory_footprint() for model in models(pipe).values())
    margin = int(stand_in.HELD_AT_MOST - 1.1 * largest)
    pipe.manager.enable_auto_cpu_offload(device=DEVICE, memory_reserve_margin=margin)


def _offload_by_accelerate(pipe):
    from accelerate import cpu_offload

    for model in models(pipe).values():
        cpu_offload(model, DEVICE)


def _nothing(pipe):
    pass


_BLOCKS = {"offload_type": "block_level", "num_blocks_per_group": 1}
_LEAVES = {"offload_type": "leaf_level"}
_STREAMS = {"use_stream": True}
_LITTLE = _STREAMS | {"low_cpu_mem_usage": True}
CALLS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "to": (_nothing, _visit),
    "modules": (_nothing, _visit_by_modules),
    "model": (lambda pipe: pipe.enable_model_cpu_offload(device=DEVICE), generate),
    "sequential": (lambda pipe: pipe.enable_sequential_cpu_offload(device=DEVICE), generate),
    "accelerate": (_offload_by_accelerate, generate),
    "manager": (_offload_by_manager, generate),
    "blocks": (partial(_offload_in_groups, **_BLOCKS), generate),
    "leaves": (partial(_offload_in_groups, **_LEAVES), generate),
    "streams-leaves": (partial(_offload_in_groups, **_LEAVES, **_STREAMS), generate),
    "streams-little-leaves": (partial(_offload_in_groups, **_LEAVES, **_LITTLE), generate),
}
"""What a program does with a pipeline: once, and for each picture."""
