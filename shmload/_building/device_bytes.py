"""Digests of bytes that lie on a device, computed there.

A weight on a device is that of a segment if both have one digest; neither is copied to the host.
"""

import functools
import secrets
from collections.abc import Sequence

import torch

Digest = tuple[int, ...]

# Bytes that are digested at a time: the device must have six times as much to spare.
_CHUNK_NBYTES = 1 << 20
_LANE_NBYTES = 4
# Two independent digests of 64 bits.
_DIGESTS = 2

_secrets: dict[torch.device, torch.Tensor] = {}


def digests_of(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> list[Digest]:
    """Return digests of tensors' bytes, which are computed on a device.

    Each 32 bits are multiplied by a random number of 64 bits that this process alone knows, and
    the products are added (multilinear hashing: Lemire and Kaser, 2014). The sums of the chunks are
    the coefficients of a polynomial, whose value at another such number is the digest.

    Args:
        tensors: contiguous, on one device.
        device: where to; their own by default.
    """
    made = [_digest(tensor, device or tensor.device) for tensor in tensors]
    # One wait for all.
    return [tuple(each) for each in torch.stack(made).cpu().tolist()] if made else []


def _digest(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    flat = tensor.detach().view(-1).view(torch.uint8)
    count = flat.numel() // _LANE_NBYTES
    head, tail = flat[: count * _LANE_NBYTES], flat[count * _LANE_NBYTES :].to(device)
    if flat.data_ptr() % _LANE_NBYTES or flat.storage_offset() % _LANE_NBYTES:
        head = head.clone()
    lanes = head.view(torch.int32)
    random = _random(device)
    step = _CHUNK_NBYTES // _LANE_NBYTES
    parts = (lanes[at : at + step].to(device) for at in range(0, count, step))
    sums = [(part * random[:, 2 : part.numel() + 2]).sum(1) for part in parts]
    if tail.numel():
        places = 256 ** torch.arange(tail.numel(), device=device)
        sums.append((tail * places).sum() * random[:, 0])
    return functools.reduce(lambda total, each: total * random[:, 1] + each, sums)


def _random(device: torch.device) -> torch.Tensor:
    """Return numbers for the last bytes, for the polynomial, and for each lane of a chunk."""
    found = _secrets.get(device)
    if found is None:
        shape = _DIGESTS, _CHUNK_NBYTES // _LANE_NBYTES + 2
        raw = bytearray(secrets.token_bytes(shape[0] * shape[1] * 8))
        numbers = torch.frombuffer(raw, dtype=torch.int64).view(shape)
        numbers[:, 1] |= 1  # an even one would lose a bit with each chunk
        # Of two threads, both get the first one's.
        found = _secrets.setdefault(device, numbers.to(device))
    return found
