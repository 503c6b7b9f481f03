"""Whether weights on a device have the bytes of a segment, without a copy to the host.

The first time, the segment's bytes go to the device and are compared there; a digest of them stays.
From then on a weight is the same if it has that digest.
"""

import secrets
from collections.abc import Sequence

import torch

Digest = tuple[int, ...]

# Bytes that are compared at a time: the device must have six times as much to spare.
_CHUNK_NBYTES = 1 << 20
_LANE_NBYTES = 4
# Two independent digests of 64 bits.
_DIGESTS = 2
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)

_seed = secrets.randbits(62)
_factors_by_device: dict[torch.device, torch.Tensor] = {}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def is_equal(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    mine, wanted = _bytes_of(tensor), _bytes_of(stored)
    steps = range(0, mine.numel(), _CHUNK_NBYTES)
    parts = [slice(at, at + _CHUNK_NBYTES) for at in steps]
    return bool(torch.stack([(mine[at] == wanted[at].to(mine.device)).all() for at in parts]).all())


def digests(tensors: Sequence[torch.Tensor]) -> list[Digest]:
    """Return digests of the tensors' bytes, which are computed where the tensors are.

    Each 32 bits are multiplied by a random number of 64 bits that this process alone knows, and
    the products are added (multilinear hashing: Lemire and Kaser, 2014). Other bytes have the same
    digests once in 2**64.
    """
    made = [_digest(tensor) for tensor in tensors]
    # One wait for all.
    return [tuple(each) for each in torch.stack(made).cpu().tolist()] if made else []


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    flat = _bytes_of(tensor)
    count = flat.numel() // _LANE_NBYTES
    factors = _factors(tensor.device)
    head, tail = flat[: count * _LANE_NBYTES], flat[count * _LANE_NBYTES :]
    lanes = (head if _is_aligned(flat) else head.clone()).view(torch.int32)
    places = 256 ** torch.arange(tail.numel(), device=flat.device)
    total = (tail * places).sum() * factors[:, 0]
    step = _CHUNK_NBYTES // _LANE_NBYTES
    for at in range(0, count, step):
        part = lanes[at : at + step]
        # Chunks in another order have another digest.
        total = total * _ODD + (part * factors[:, 1 : part.numel() + 1]).sum(1)
    return total


def _is_aligned(flat: torch.Tensor) -> bool:
    return flat.storage_offset() % _LANE_NBYTES == 0


def _factors(device: torch.device) -> torch.Tensor:
    """Return random numbers, for the last bytes and for each lane of a chunk."""
    found = _factors_by_device.get(device)
    if found is None:
        generator = torch.Generator().manual_seed(_seed)
        shape = (_DIGESTS, _CHUNK_NBYTES // _LANE_NBYTES + 1)
        bounds = -(1 << 63), (1 << 63) - 1
        found = torch.randint(*bounds, shape, dtype=torch.int64, generator=generator).to(device)
        _factors_by_device[device] = found
    return found
