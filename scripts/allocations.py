"""Count what loads ask of a GPU's driver: `python scripts/allocations.py`. No GPU needed.

Torch's caching allocator is replayed by its rules (CUDACachingAllocator.cpp, without options) for
the tensors of known models in bfloat16: allocated one by one, and from one block taken before.
"""

import bisect
from collections.abc import Iterator

from benchmarks.published import PIPELINES
from torch import nn

_MIB = 1 << 20
_SMALL_NBYTES = _MIB  # kSmallSize
_SMALL_BLOCK_NBYTES = 2 * _MIB  # kSmallBuffer
_MIDDLE_NBYTES = 10 * _MIB  # kMinLargeAlloc
_MIDDLE_BLOCK_NBYTES = 20 * _MIB  # kLargeBuffer
_ROUNDED_TO_NBYTES = 2 * _MIB  # kRoundLarge
# As `Moves` does: smaller tensors share an allocation of 1 MiB.
_LARGE_NBYTES = _MIB // 2
_ITEM_NBYTES = 2
_MODELS = {
    "Flux transformer": PIPELINES["flux-dev"]["transformer"],
    "Wan 2.1 14B transformer": PIPELINES["wan21-14b"]["transformer"],
    "T5-XXL encoder": PIPELINES["flux-dev"]["text_encoder_2"],
    "SDXL UNet": PIPELINES["sdxl"]["unet"],
}


def allocations(model: nn.Module) -> Iterator[int]:
    """Yield the sizes that a load of a model allocates, in bytes and in order."""
    used = _MIB
    for tensor in dict.fromkeys((*model.parameters(), *model.buffers())):
        nbytes = _up(tensor.numel() * _ITEM_NBYTES, 256)
        if nbytes >= _LARGE_NBYTES:
            yield nbytes
        elif used + nbytes > _MIB:
            used = nbytes
            yield _MIB
        else:
            used += nbytes


def replay(sizes: list[int], reserved_nbytes: int) -> tuple[int, int]:
    """Return how often the allocator calls the driver, and how much it has then, in bytes."""
    free: dict[bool, list[int]] = {True: [], False: [reserved_nbytes] if reserved_nbytes else []}
    calls, total = len(free[False]), reserved_nbytes
    for size in sizes:
        is_small = size <= _SMALL_NBYTES
        blocks = free[is_small]
        place = bisect.bisect_left(blocks, size)
        if place < len(blocks):
            block = blocks.pop(place)
        else:
            block = _block_nbytes(size)
            calls, total = calls + 1, total + block
        if block - size >= (512 if is_small else _SMALL_NBYTES + 1):
            bisect.insort(blocks, block - size)
    return calls, total


def _block_nbytes(size: int) -> int:
    if size <= _SMALL_NBYTES:
        return _SMALL_BLOCK_NBYTES
    return _MIDDLE_BLOCK_NBYTES if size < _MIDDLE_NBYTES else _up(size, _ROUNDED_TO_NBYTES)


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def main() -> None:
    """Print a row for each model."""
    for name, published in _MODELS.items():
        model = published.make()
        sizes = [_up(size, 512) for size in allocations(model)]
        tensors = dict.fromkeys((*model.parameters(), *model.buffers()))
        weights = sum(tensor.numel() for tensor in tensors) * _ITEM_NBYTES
        large = sum(size for size in sizes if size > _SMALL_NBYTES)
        row = [name, f"{weights / (1 << 30):.2f} GiB"]
        for reserved in (0, _up(large, _ROUNDED_TO_NBYTES)):
            calls, total = replay(sizes, reserved)
            row += [str(calls), f"{(total / weights - 1) * 100:.2f} %"]
        print(" | ".join(row))


if __name__ == "__main__":
    main()
