"""Loads that are remembered, and changes of their sources, for several test modules."""

import json
import os

import torch
from safetensors.torch import load_file, save_file

import shmload

BF16 = torch.bfloat16


def load(source, **given):
    return shmload.load_pipeline(source, **{"dtype": BF16, "keep": True, "progress": False} | given)


def kept():
    """Return what the segments of built objects say."""
    return [info.kept for info in shmload.segments() if info.kept]


# Changes ------------------------------------------------------------------------------------------


def change_scheduler(source, monkeypatch):
    file = source / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"steps_offset": 7}))


def change_weights_at_the_same_time(source, monkeypatch):
    file = source / "unet" / "diffusion_pytorch_model.safetensors"
    before = file.stat()
    tensors = load_file(file)
    tensors["conv_in.bias"] += 1
    save_file(tensors, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
