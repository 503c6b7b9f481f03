"""Make pipelines with the configurations of well-known models and empty weight files.

    python scripts/architectures.py DIRECTORY [flux-dev ...]
    shmload plan DIRECTORY/flux-dev --inventory 2x24GiB

The weight files have real headers (names, shapes, dtypes) and sparse data: they take no room on the
disk, and any step that only reads headers works on them. The names and configurations are in
`benchmarks.published`.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.published import PIPELINES
from benchmarks.published_models import Model

from shmload._checkpoints.dtypes import NBITS, TORCH_NAMES
from shmload._checkpoints.formats.safetensors import build_header
from shmload._checkpoints.header import TensorSpec

_DTYPES = {
    getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)
}


def save(name: str, root: Path) -> Path:
    """Write one of `PIPELINES` into a directory of its own, and return that."""
    pipeline_class, components = PIPELINES[name]
    folder = root / name
    index: dict[str, Any] = {"_class_name": pipeline_class}
    for component, entry in components.items():
        below = folder / component
        below.mkdir(parents=True, exist_ok=True)
        if isinstance(entry, Model):
            index[component] = [entry.library, entry.class_name]
            _save_model(entry, below)
        else:
            index[component] = list(entry)
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return folder


def _save_model(model: Model, folder: Path) -> None:
    made = model.make()
    is_diffusers = model.library == "diffusers"
    if is_diffusers:
        made.save_config(folder)
    else:
        made.config.dtype = model.dtype
        made.config.architectures = [model.class_name]
        made.config.save_pretrained(folder)
    base = "diffusion_pytorch_model" if is_diffusers else "model"
    specs = tuple(_specs(made, model.dtype))
    header = build_header(specs, {"format": "pt"}, 8)
    with open(folder / f"{base}.safetensors", "wb") as file:
        file.write(header)
        os.truncate(file.fileno(), len(header) + specs[-1].end)


def _specs(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[TensorSpec]:
    position = 0
    seen = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied: safetensors stores the first name only
            continue
        seen.add(id(tensor))
        stored = _DTYPES[dtype if tensor.is_floating_point() else tensor.dtype]
        nbytes = tensor.numel() * NBITS[stored] // 8
        yield TensorSpec(name, stored, tuple(tensor.shape), position, position + nbytes)
        position += nbytes


if __name__ == "__main__":
    for name in sys.argv[2:] or PIPELINES:
        print(save(name, Path(sys.argv[1])))
