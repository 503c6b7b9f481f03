"""For programs that offload: the stand-in device, a pipeline, and where its weights lie.

import offloading as o        # in a program of its own: it changes torch
pipe = o.load(source)
"""

import stand_in
import torch

import shmload
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
        if each.is_cpu and not any(a <= each.data_ptr() < b for a, b in spans)
    ]


def all_outside(pipe):
    """As `outside`, for all models of a pipeline."""
    return [f"{name}.{key}" for name, model in models(pipe).items() for key in outside(model)]


def from_device():
    """Return how many bytes were copied from the device."""
    return stand_in.counts().from_device


def unlink_all():
    """Remove the names of all segments, used or not."""
    for name in segment_names():
        shm_unlink(name)


def run_unet(unet):
    """Run a UNet on the device, with noise."""
    config = unet.config
    with torch.no_grad():
        noise = torch.randn(1, config.in_channels, 8, 8, dtype=unet.dtype).to(DEVICE)
        states = torch.randn(1, 7, config.cross_attention_dim, dtype=unet.dtype).to(DEVICE)
        return unet(noise, torch.tensor([1]).to(DEVICE), states).sample.cpu()
