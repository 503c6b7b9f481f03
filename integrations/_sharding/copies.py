"""Copies of parts of tensors on a device, each with memory of its own."""

from collections.abc import Sequence

import torch
from torch import nn

from shmload.integrations.placing import to_device


def copy_to(parts: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy views of mapped tensors to a device; blocks until all are there.

    What is consecutive in memory goes to a CUDA device in bulk, through a ring of pinned memory;
    for anything else one copy at most is on the host beside it.

    Args:
        parts: on the CPU.
        device: `cuda` without an index is the process's current one.

    Returns:
        Contiguous tensors, in the same order.
    """
    if device.type != "cuda":
        return [_copied(part, device) for part in parts]
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    carrier = nn.Module()
    for number, part in enumerate(parts):
        if part.is_contiguous() and part.numel():
            carrier.register_buffer(str(number), part)
    if carrier._buffers:
        to_device(carrier, str(device))
    there = carrier._buffers
    copies = ((there.get(str(number)), part) for number, part in enumerate(parts))
    return [_copied(part, device) if copy is None else copy for copy, part in copies]


def _copied(part: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(part.shape, dtype=part.dtype, device=device).copy_(part)
