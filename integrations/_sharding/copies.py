"""Copies of slices to a device; each copy has its own memory."""

from collections.abc import Sequence

import torch
from torch import nn

from shmload.integrations.placing import to_device


def copy_to(slices: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy views of mapped tensors to a device; blocks until all are there.

    Contiguous views go to a CUDA device in bulk, through a ring of pinned memory. Each other view
    is copied by itself, with one copy at most on the host at a time.

    Args:
        slices: on the CPU.
        device: `cuda` without an index is the process's current one.

    Returns:
        Contiguous tensors, in the same order.
    """
    if device.type != "cuda":
        return [_copied(view, device) for view in slices]
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    carrier = nn.Module()
    for number, view in enumerate(slices):
        if view.is_contiguous() and view.numel():
            carrier.register_buffer(str(number), view)
    if carrier._buffers:
        to_device(carrier, str(device))
    in_bulk = carrier._buffers
    copies = ((in_bulk.get(str(number)), view) for number, view in enumerate(slices))
    return [_copied(view, device) if copy is None else copy for copy, view in copies]


def _copied(view: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(view.shape, dtype=view.dtype, device=device).copy_(view)
