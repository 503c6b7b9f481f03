"""A component as blocks, which may go to different devices, and the rest, which may not.

Blocks are the modules that their library calls indivisible (`_no_split_modules`). The rest,
embeddings and norms that one forward combines, works on one device only: the main one, which takes
the inputs and returns the outputs.
"""

from collections.abc import Sequence
from itertools import accumulate

import msgspec

from shmload._placement.device_map import tied_units
from shmload._placement.modules import Component, join


class Block(msgspec.Struct, frozen=True):
    """One module, or several that share tensors together with all modules between them."""

    paths: tuple[str, ...]
    nbytes: int
    """Size of all, in bytes."""
    leaf_nbytes: int
    """Size of the largest module without children in it, in bytes."""


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
    leaf_nbytes: int
    """Size of the largest module without children, in bytes: so much passes of it at a time."""
    gaps: tuple[int, ...]
    """How many of the first 0, 1, 2, ... blocks follow modules of the rest that have weights."""

    @property
    def nbytes(self) -> int:
        """Size of the whole component, in bytes."""
        return self.rest_nbytes + self.ends[-1]


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
    joined = _joined(spans)
    for first, last in joined:
        inside = order[first : last + 1]
        blocks.append(
            Block(
                tuple(inside),
                sum(units[path].nbytes for path in inside),
                max(units[path].largest_leaf_nbytes for path in inside),
            )
        )
    return Divided(
        component=component,
        blocks=tuple(blocks),
        rest=tuple(path for path in units if path not in free),
        rest_nbytes=sum(unit.nbytes for path, unit in units.items() if path not in free),
        ends=tuple(accumulate((block.nbytes for block in blocks), initial=0)),
        leaf_nbytes=component.module.largest_leaf_nbytes,
        gaps=tuple(accumulate((after_rest[first] for first, _ in joined), initial=0)),
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
