"""What the libraries' offloading calls keep on a device, so that a plan can say which of them fit.

They move whole models, top-level blocks or leaves, by the rules of diffusers 0.42
(`DiffusionPipeline.enable_model_cpu_offload`, `hooks/group_offloading.py`) and accelerate 1.15
(`cpu_offload`). Some autoencoders name blocks of their own: calls keep less of these than is said.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from shmload._placement.modules import Component, Module
from shmload._tables import Table
from shmload._wording import format_nbytes


class OffloadingUse(msgspec.Struct, frozen=True, kw_only=True):
    """What one offloading call keeps on its device."""

    call: str
    """With the arguments that count."""
    nbytes: int
    """Size of the weights that are there at a time, at most, in bytes; activations not counted."""


def offloading_uses(components: Sequence[Component]) -> tuple[OffloadingUse, ...]:
    """Return what each call keeps on its device.

    Args:
        components: of a pipeline, which compute one after the other.
    """
    modules = {component.name: component.module for component in components}
    found = []
    for call, kept in _KEPT.items():
        staying = _STAYING.intersection(modules) if call in _LEAVES_SOME else set()
        most = max((kept(each) for name, each in modules.items() if name not in staying), default=0)
        most += sum(modules[name].nbytes for name in staying)
        found.append(OffloadingUse(call=call, nbytes=most))
    return tuple(found)


def offloading_table(uses: Sequence[OffloadingUse], room_nbytes: int | None) -> Table:
    """Return a table of the calls.

    Args:
        uses: its rows.
        room_nbytes: size of the largest accelerator; None if there is none, or without a limit.
    """
    rows = [
        (
            use.call,
            format_nbytes(use.nbytes),
            "-" if not room_nbytes else "yes" if use.nbytes <= room_nbytes else "no",
        )
        for use in uses
    ]
    return Table(titles=("OFFLOADING CALL", "AT A TIME", "FITS"), rows=rows, right=(1,))


def _whole(module: Module) -> int:
    return module.nbytes


def _block(module: Module) -> int:
    """The elements of the lists that a model holds take turns; all else stays while it computes."""
    blocks = _blocks_of(module)
    return module.nbytes - sum(blocks) + max(blocks, default=0)


def _two_blocks(module: Module) -> int:
    """The next block is copied while one computes."""
    blocks = _blocks_of(module)
    two = max(map(sum, pairwise(blocks)), default=sum(blocks))
    return module.nbytes - sum(blocks) + two


def _leaf(module: Module) -> int:
    return module.largest_leaf_nbytes


def _blocks_of(module: Module) -> list[int]:
    """Return the sizes of the elements of the lists among a module's children."""
    lists = (child.children for child in module.children)
    return [
        element.nbytes
        for elements in lists
        if elements and all(element.name.isdecimal() for element in elements)
        for element in elements
    ]


_KEPT: dict[str, Callable[[Module], int]] = {
    "enable_model_cpu_offload()": _whole,
    'enable_group_offload(offload_type="block_level", use_stream=True)': _two_blocks,
    'enable_group_offload(offload_type="block_level", num_blocks_per_group=1)': _block,
    'enable_group_offload(offload_type="leaf_level")': _leaf,
    "enable_sequential_cpu_offload()": _leaf,
}
# Pipelines except components of these names from these calls (`_exclude_from_cpu_offload`).
_STAYING = frozenset({"safety_checker", "watermarker"})
_LEAVES_SOME = frozenset({"enable_model_cpu_offload()", "enable_sequential_cpu_offload()"})
