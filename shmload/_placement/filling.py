"""Filling devices with the blocks of a component."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from shmload._placement.dividing import Divided
from shmload._placement.spots import Rooms, Run, Spot

# Sums of sizes that `fullest_subset` remembers at most.
_MAX_SUMS = 2048
# It weighs so many sizes against each other; with more the gain is less than the smallest of them.
_MAX_SIZES = 64


def in_order(item: Divided, free: Rooms) -> Iterator[Spot]:
    """Yield the ways to divide a component so that one device is full before the next is used.

    Each device gets consecutive blocks; the first one also the rest.
    """
    for main in free:
        for is_reversed in (False, True):
            order = {main: free[main], **free}
            runs = _fill_in_order(item, order, is_reversed=is_reversed)
            if runs is not None:
                yield Spot(item, main, runs)


def _fill_in_order(item: Divided, free: Rooms, *, is_reversed: bool) -> tuple[Run, ...] | None:
    """Return the runs of blocks if one device after the other is filled; None if they do not fit.

    Args:
        item: the component; its rest lies on the first device.
        free: what may still be used of each device, in bytes.
        is_reversed: whether the first device gets the last blocks, not the first.
    """
    runs: list[Run] = []
    count, ends = len(item.blocks), item.ends
    at, taken = count if is_reversed else 0, item.rest_nbytes
    for device, nbytes in free.items():
        left = nbytes - taken
        if left < 0:
            return None
        before = at
        if is_reversed:
            at = bisect_left(ends, ends[at] - left)
            runs.append((device, before))
        else:
            at = bisect_right(ends, ends[at] + left) - 1
            runs.append((device, at))
        if at == (0 if is_reversed else count):
            return tuple(reversed(runs)) if is_reversed else tuple(runs)
        taken = 0
    return None


def in_part(item: Divided, main: str, free: Rooms) -> Iterator[Spot]:
    """Yield the ways to fill devices with as much of a component as they hold.

    Each device gets consecutive blocks if none fill it better.

    Args:
        item: the component.
        main: the device of its rest; nothing is yielded if that does not fit there.
        free: what may be used of each device.
    """
    if free[main] < item.rest_nbytes:
        return
    others = {device: left for device, left in free.items() if device != main}
    for order in ({main: free[main], **others}, {**others, main: free[main]}):
        yield Spot(item, main, _fill_in_part(item, main, order))


def _fill_in_part(item: Divided, main: str, free: Mapping[str, int]) -> tuple[Run, ...]:
    found = [""] * len(item.blocks)
    for device, nbytes in free.items():
        left = [number for number, has in enumerate(found) if not has]
        sizes = [item.blocks[number].nbytes for number in left]
        limit = nbytes - item.rest_nbytes * (device == main)
        chosen: Sequence[int] = fullest_subset(sizes, limit)
        run = fullest_run(sizes, limit)
        if sum(sizes[at] for at in run) >= sum(sizes[at] for at in chosen):
            chosen = run
        for at in chosen:
            found[left[at]] = device
    runs, stop = [], 0
    for device, group in groupby(found):
        stop += len(list(group))
        runs.append((device, stop))
    return tuple(runs)


def fullest_subset(sizes: Sequence[int], limit: int) -> list[int]:
    """Return the indices of sizes whose sum is the largest within a limit.

    Of equal sums the one of the first sizes. Of more than 64 sizes, or of many different ones, it
    is a good sum, not always the largest.
    """
    found: list[int] = []
    start = 0
    while len(sizes) - start > _MAX_SIZES and sizes[start] <= limit:
        limit -= sizes[start]
        found.append(start)
        start += 1
    # By sum: the last index, and the sum without it.
    reached: dict[int, tuple[int, int]] = {0: (-1, 0)}
    stop = min(start + _MAX_SIZES, len(sizes))
    for index in range(start, stop):
        for total in [total for total in reached if total + sizes[index] <= limit]:
            reached.setdefault(total + sizes[index], (index, total))
        if len(reached) > _MAX_SUMS:
            stop = index + 1
            break
    total = max(reached)
    limit -= total
    while total:
        index, total = reached[total]
        found.append(index)
    found += [index for index in range(start, stop) if sizes[index] == 0]
    for index in range(stop, len(sizes)):
        if sizes[index] <= limit:
            limit -= sizes[index]
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
