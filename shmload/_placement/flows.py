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
    """The path of the module that the activations go to; empty for the end of the component."""
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


def cuts(
    components: Mapping[str, str | Mapping[str, str]], execution_devices: Mapping[str, str]
) -> list[Cut]:
    """Return where activations change devices, in the order of the modules.

    Args:
        components: of the placement.
        execution_devices: of the placement; a component begins and ends on its own.
    """
    found = []
    for component, where in components.items():
        main = here = execution_devices[component]
        for path, device in ({"": where} if isinstance(where, str) else where).items():
            target = main if device in WAITING else device
            if target in (here, META):
                continue
            found.append(Cut(component=component, at=path, source=here, target=target))
            here = target
        if here != main:
            found.append(Cut(component=component, at="", source=here, target=main))
    return found
