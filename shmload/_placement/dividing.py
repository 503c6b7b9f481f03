"""A component as blocks, which may go to different devices, and the rest, which may not.

Blocks are the modules that their library calls indivisible (`_no_split_modules`). The rest,
embeddings and norms that one forward combines, works on one device only: the main one, which takes
the inputs and returns the outputs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from shmload._placement.device_map import tied_units
from shmload._placement.modules import Component, join

# Sums of block sizes that `fullest_subset` remembers; exact for eleven blocks of any sizes, and for
# the two or three sizes that real models have.
_MAX_SUMS = 2048


class Block(msgspec.Struct, frozen=True):
    """One module, or several that share tensors together with all modules between them."""

    paths: tuple[str, ...]
    nbytes: int
    """Size of all, in bytes."""
    leaf_nbytes: int
    """Size of the largest module without children in it, in bytes."""
    follows_rest: bool
    """Whether modules of the rest that have weights stand before it, after the previous block."""


class Divided(msgspec.Struct, frozen=True, kw_only=True):
    """A component as blocks and the rest."""

    component: Component
    blocks: tuple[Block, ...]
    """In the order of the component; none if it cannot be divided."""
    rest: tuple[str, ...]
    """Paths of all other units."""
    rest_nbytes: int
    ends: tuple[int, ...]
    """Sizes of the first 0, 1, 2, ... blocks together, in bytes."""

    @property
    def nbytes(self) -> int:
        """Size of the whole component, in bytes."""
        return self.rest_nbytes + self.ends[-1]

    def devices(self, main: str, block_devices: Sequence[str]) -> dict[str, str]:
        """Return the device of every unit that has one.

        Args:
            main: the device of the rest.
            block_devices: by block; empty for a block that waits.
        """
        devices = dict.fromkeys(self.rest, main)
        for block, device in zip(self.blocks, block_devices, strict=True):
            if device:
                devices |= dict.fromkeys(block.paths, device)
        return devices

    def cuts(self, main: str, block_devices: Sequence[str]) -> int:
        """Return how often activations pass to another device in one forward.

        Args: as for `devices`; blocks that wait compute on the main device.
        """
        cuts, here = 0, main
        for block, device in zip(self.blocks, block_devices, strict=True):
            if block.follows_rest:
                cuts += here != main
                here = main
            cuts += here != (device or main)
            here = device or main
        return cuts + (here != main)


def divide(component: Component) -> Divided:
    """Return the blocks of a component and the rest; no blocks if it cannot be divided."""
    units = {join(component.name, path): unit for path, unit in component.module.units()}
    ties = [tied_units(component, tie) for tie in component.ties]
    free = {path for path, unit in units.items() if unit.is_whole and len(units) > 1}
    # A module that shares a tensor with the rest belongs to the rest.
    while stuck := {path for tie in ties if not free.issuperset(tie) for path in tie} & free:
        free -= stuck
    order = [path for path in units if path in free]
    index = {path: number for number, path in enumerate(order)}
    spans = [(n, n) for n in range(len(order))]
    for tie in ties:
        if tie[0] in free:
            at = sorted(index[path] for path in tie)
            spans.append((at[0], at[-1]))
    after_rest = _after_rest([(path in free, unit.nbytes) for path, unit in units.items()])
    blocks = []
    for first, last in _joined(spans):
        inside = order[first : last + 1]
        blocks.append(
            Block(
                tuple(inside),
                sum(units[path].nbytes for path in inside),
                max(units[path].largest_leaf_nbytes for path in inside),
                after_rest[first],
            )
        )
    return Divided(
        component=component,
        blocks=tuple(blocks),
        rest=tuple(path for path in units if path not in free),
        rest_nbytes=sum(unit.nbytes for path, unit in units.items() if path not in free),
        ends=tuple(accumulate((block.nbytes for block in blocks), initial=0)),
    )


def _after_rest(units: Sequence[tuple[bool, int]]) -> list[bool]:
    """Tell of each block whether a unit of the rest that has weights stands just before it.

    Args:
        units: in order, whether each is a block, and its size in bytes.
    """
    found, is_after = [], False
    for is_block, nbytes in units:
        if is_block:
            found.append(is_after)
            is_after = False
        else:
            is_after = is_after or nbytes > 0
    return found


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans of indices that overlap."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def fill_in_order(
    divided: Divided, free: Mapping[str, int], *, is_reversed: bool = False
) -> list[str] | None:
    """Fill one device after the other with consecutive blocks.

    Args:
        divided: the component; its rest lies on the first device.
        free: what may still be used of each device, in bytes.
        is_reversed: whether the first device gets the last blocks, not the first.

    Returns:
        The device of each block; None if they do not fit.
    """
    found: list[str] = []
    count, ends = len(divided.blocks), divided.ends
    taken = divided.rest_nbytes
    for device, nbytes in free.items():
        left = nbytes - taken
        if left < 0:
            return None
        if is_reversed:
            at = count - len(found)
            found += [device] * (at - bisect_left(ends, ends[at] - left))
        else:
            at = len(found)
            found += [device] * (bisect_right(ends, ends[at] + left) - 1 - at)
        taken = 0
    if len(found) < count:
        return None
    return found[::-1] if is_reversed else found


def fill_in_part(divided: Divided, main: str, free: Mapping[str, int]) -> list[str]:
    """Fill one device after the other with the blocks that leave the least of it empty.

    Args:
        divided: the component.
        main: the device of its rest, which fits there.
        free: what may still be used of each device, in bytes.

    Returns:
        The device of each block; empty for one that fits nowhere.
    """
    found = [""] * len(divided.blocks)
    for device, nbytes in free.items():
        left = [number for number, has in enumerate(found) if not has]
        sizes = [divided.blocks[number].nbytes for number in left]
        limit = nbytes - divided.rest_nbytes * (device == main)
        chosen: Sequence[int] = fullest_subset(sizes, limit)
        run = fullest_run(sizes, limit)
        if sum(sizes[at] for at in run) == sum(sizes[at] for at in chosen):
            chosen = run
        for at in chosen:
            found[left[at]] = device
    return found


def fullest_subset(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the indices of the sizes whose sum is the largest within a limit.

    Of equal sums the one of the first sizes. Of many different sizes it is a good sum, not always
    the largest.
    """
    if sum(sizes) <= limit:
        return list(range(len(sizes)))
    # By sum: the last index, and the sum without it.
    reached: dict[int, tuple[int, int]] = {0: (-1, 0)}
    later = len(sizes)
    for index, size in enumerate(sizes):
        for total in [total for total in reached if total + size <= limit]:
            reached.setdefault(total + size, (index, total))
        if len(reached) > _MAX_SUMS:
            later = index + 1
            break
    best = total = max(reached)
    found = [index for index, size in enumerate(sizes) if size == 0]
    while total:
        index, total = reached[total]
        found.append(index)
    for index in range(later, len(sizes)):
        if sizes[index] and best + sizes[index] <= limit:
            best += sizes[index]
            found.append(index)
    return sorted(found)


def fullest_run(sizes: Sequence[int], limit: int) -> range:
    """Return the consecutive indices of the sizes whose sum is the largest within a limit."""
    best, best_sum, start, total = range(0), 0, 0, 0
    for stop, size in enumerate(sizes, 1):
        total += size
        while total > limit and start < stop:
            total -= sizes[start]
            start += 1
        if total > best_sum:
            best, best_sum = range(start, stop), total
    return best
