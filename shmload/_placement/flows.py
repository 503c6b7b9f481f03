"""What moves while a placed pipeline computes: weights that wait, and activations at cuts."""

from collections.abc import Mapping, Sequence

import msgspec

from shmload._placement.inventory import CPU, META, OFFLOAD
from shmload._placement.table import WAITING, TableRow


class Travel(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that come to the device that computes with them, each time that they are used."""

    name: str
    """The component and its modules."""
    source: str
    """Where they wait: `cpu` or `disk`."""
    target: str
    """The device that computes."""
    nbytes: int
    """Size of these weights, in bytes."""
    is_each_step: bool
    """Whether they travel at every step of a generation, and not once."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A place in a component where activations go to another device."""

    component: str
    at: str
    """The modules that the activations go to; empty for the end of the component."""
    source: str
    target: str


def travels(parts: Sequence[TableRow]) -> list[Travel]:
    """Return the weights that travel; those of every step first, then the largest."""
    found = [
        Travel(
            name=part.name,
            source=CPU if part.device == OFFLOAD else part.device,
            target=part.execution_device,
            nbytes=part.nbytes,
            is_each_step=part.runs_each_step,
        )
        for part in parts
        if part.device in WAITING and part.execution_device != CPU
    ]
    return sorted(found, key=lambda each: (not each.is_each_step, -each.nbytes))


def cuts(parts: Sequence[TableRow], execution_devices: Mapping[str, str]) -> list[Cut]:
    """Return where activations change devices, in the order in which a component computes.

    Args:
        parts: of the placement.
        execution_devices: of the placement; a component begins and ends on its own.
    """
    found = []
    for component, main in execution_devices.items():
        here = main
        for part in parts:
            if part.component != component or part.execution_device == META:
                continue
            target = part.execution_device
            if target != here:
                found.append(Cut(component=component, at=part.modules, source=here, target=target))
            here = target
        if here != main:
            found.append(Cut(component=component, at="", source=here, target=main))
    return found
