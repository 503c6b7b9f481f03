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
    keeps_one_copy: bool
    """Whether the weights on the host stay those that processes share."""


def offloading_uses(components: Sequence[Component]) -> tuple[OffloadingUse, ...]:
    """Return what each call keeps on its device.

    Args:
        components: of a pipeline, which compute one after the other.
    """
    modules = {component.name: component.module for component in components}
    found = []
    for call in _CALLS:
        staying = _STAYING.intersection(modules) if call.leaves_some else set()
        moving = (each for name, each in modules.items() if name not in staying)
        most = max(map(call.kept, moving), default=0)
        most += sum(modules[name].nbytes for name in staying)
        found.append(OffloadingUse(call=call.text, nbytes=most, keeps_one_copy=call.keeps_one_copy))
    return tuple(found)


def offloading_table(uses: Sequence[OffloadingUse], room_nbytes: int | None) -> Table:
    """Return a table of the calls.

    Args:
        uses: its rows.
        room_nbytes: size of the largest accelerator; None without a limit.
    """
    rows = [
        (
            use.call,
            format_nbytes(use.nbytes),
            "-" if not room_nbytes else _yes_or_no(use.nbytes <= room_nbytes),
            _yes_or_no(use.keeps_one_copy),
        )
        for use in uses
    ]
    titles = "OFFLOADING CALL", "AT A TIME", "FITS", "ONE COPY"
    return Table(titles=titles, rows=rows, right=(1,))


def _yes_or_no(is_so: bool) -> str:
    return "yes" if is_so else "no"


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


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    kept: Callable[[Module], int]
    """What it keeps of a component, in bytes."""
    leaves_some: bool = False
    """Whether it leaves components where they are (`_exclude_from_cpu_offload` of pipelines)."""
    keeps_one_copy: bool = True


_STAYING = frozenset({"safety_checker", "watermarker"})
_GROUPS = 'pipe.enable_group_offload("cuda", offload_type='
_BLOCKS = f'{_GROUPS}"block_level", num_blocks_per_group=1'
_CALLS = (
    _Call(text="pipe.enable_model_cpu_offload()", kept=_whole, leaves_some=True),
    _Call(text='manager.enable_auto_cpu_offload("cuda")', kept=_whole),
    # A stream pins copies of the weights.
    _Call(text=f"{_BLOCKS}, use_stream=True)", kept=_two_blocks, keeps_one_copy=False),
    _Call(text=f"{_BLOCKS})", kept=_block),
    _Call(text=f'{_GROUPS}"leaf_level")', kept=_leaf),
    _Call(text="pipe.enable_sequential_cpu_offload()", kept=_leaf, leaves_some=True),
)
