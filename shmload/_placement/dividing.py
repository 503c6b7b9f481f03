"""A component divided over devices: runs of its blocks in order, and all else on one of them.

Cut is only between the modules that their library calls indivisible (`_no_split_modules`): what
lies between those, embeddings and norms that a forward combines, works on one device only.
"""

from collections.abc import Mapping, Sequence

import msgspec

from shmload._placement.device_map import tied_pieces
from shmload._placement.modules import Component, join

# Of the share of each device that is used: finer than any block.
_LEVEL_STEPS = 1 << 12


class Block(msgspec.Struct, frozen=True):
    """One module, or several that share tensors, with those between them."""

    paths: tuple[str, ...]
    nbytes: int


class Divided(msgspec.Struct, frozen=True, kw_only=True):
    """What of a component can go to different devices."""

    blocks: tuple[Block, ...]
    """In order."""
    rest: tuple[str, ...]
    """Paths of all other pieces."""
    rest_nbytes: int

    def place(self, main: str, runs: Sequence[str]) -> dict[str, str]:
        """Return the device of every piece, given those of the first blocks."""
        devices = dict.fromkeys(self.rest, main)
        for block, device in zip(self.blocks, runs, strict=False):
            devices |= dict.fromkeys(block.paths, device)
        return devices


def divide(component: Component) -> Divided:
    """Return the blocks of a component; none if it cannot be cut."""
    pieces = {join(component.name, path): piece for path, piece in component.module.pieces()}
    ties = [tied_pieces(component, tie) for tie in component.ties]
    free = {path for path, piece in pieces.items() if piece.is_whole and len(pieces) > 1}
    # A block that shares a tensor with what stays, stays too.
    while stuck := {path for tie in ties if not free.issuperset(tie) for path in tie} & free:
        free -= stuck
    order = [path for path in pieces if path in free]
    spans = [(n, n) for n in range(len(order))]
    for tie in ties:
        if tie[0] in free:
            at = sorted(order.index(path) for path in tie)
            spans.append((at[0], at[-1]))
    blocks = []
    for first, last in _joined(spans):
        inside = order[first : last + 1]
        nbytes = sum(pieces[path].nbytes for path in inside)
        blocks.append(Block(tuple(inside), nbytes))
    return Divided(
        blocks=tuple(blocks),
        rest=tuple(path for path in pieces if path not in free),
        rest_nbytes=sum(piece.nbytes for path, piece in pieces.items() if path not in free),
    )


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans of indices that overlap."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return found


def split(
    component: Component, used: Mapping[str, int], rooms: Mapping[str, int]
) -> dict[str, str] | None:
    """Divide a component over as few devices as hold it, each used to the same share.

    Few, because activations cross at every cut at every step.

    Args:
        component: of the pipeline.
        used: by device, in bytes.
        rooms: what may be used of each at most, likewise, in order.

    Returns:
        The device of every piece, or None if it does not fit.
    """
    divided = divide(component)
    by_free = sorted(rooms, key=lambda device: used[device] - rooms[device])
    for count in range(1, len(rooms) + 1):
        chosen = [device for device in rooms if device in by_free[:count]]
        for main in chosen:
            order = [main, *(device for device in chosen if device != main)]
            found = _fill_evenly(divided, order, used, rooms)
            if found:
                return divided.place(main, found)
    return None


def _fill_evenly(
    divided: Divided, order: Sequence[str], used: Mapping[str, int], rooms: Mapping[str, int]
) -> list[str] | None:
    """Return the device of each block such that the fullest device is as empty as can be."""
    best = None
    low, high = 0, _LEVEL_STEPS
    while low <= high:
        level = (low + high) // 2
        free = {d: rooms[d] * level // _LEVEL_STEPS - used[d] for d in order}
        found = fill(divided, free)
        if len(found) == len(divided.blocks) and free[order[0]] >= divided.rest_nbytes:
            best, high = found, level - 1
        else:
            low = level + 1
    return best


def fill(divided: Divided, free: Mapping[str, int]) -> list[str]:
    """Return the devices of the first blocks, as many as fit, one device after the other.

    Args:
        divided: what is placed. All that is no block lies on the first device.
        free: by device, in bytes.
    """
    found: list[str] = []
    devices = iter(free)
    device = next(devices)
    left = free[device] - divided.rest_nbytes
    for block in divided.blocks:
        while block.nbytes > left:
            following = next(devices, None)
            if following is None:
                return found
            device, left = following, free[following]
        left -= block.nbytes
        found.append(device)
    return found
