"""Copies of weights on one device: models that have the same weights share them.

A weight is the same if it lies at the same place of the same segment. Models go back to the host as
they were there, and nothing is read from the device.
"""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shmload._building.alive import Alive
from shmload._building.homes import Home, Homes, homes_in_all
from shmload._building.mapped import modules_of, plain_tensors
from shmload._building.placing import to_device
from shmload._compat import as_plain_tensors

_LABEL = "device"


class _Slot(NamedTuple):
    """Where a module holds a tensor, and that tensor, which is on the host."""

    tensors: Any
    """The module's parameters or buffers, by name."""
    name: str
    tensor: torch.Tensor
    key: Hashable
    """Of its copy."""


class Brought(NamedTuple):
    """Models that are on the device."""

    slots: list[_Slot]
    copies: dict[Hashable, torch.Tensor]
    """What they have there; kept here, so that other models find it."""

    @property
    def sizes(self) -> dict[Hashable, int]:
        """The sizes of the copies, in bytes."""
        return {key: _nbytes_of(copy) for key, copy in self.copies.items()}


class DeviceCopies:
    """The copies on a device.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: weakref.WeakValueDictionary[Hashable, torch.Tensor]
        self._copies = weakref.WeakValueDictionary()
        self._alive = Alive()

    @property
    def nbytes(self) -> int:
        """Size of the copies that any code still refers to, in bytes."""
        return self._alive.nbytes(_LABEL)

    def sizes_of(self, models: Iterable[torch.nn.Module]) -> dict[Hashable, int]:
        """Return the sizes of the copies that some models on the host would have, in bytes."""
        return {slot.key: _nbytes_of(slot.tensor) for slot in _slots_of(models)}

    def bring(self, models: Mapping[str, torch.nn.Module]) -> tuple[Brought, int]:
        """Move models from the host to the device; blocks until they are there.

        Returns:
            What to give to `put_back`, and how much was copied, in bytes.

        Raises:
            torch.OutOfMemoryError: the device is full; the models are as they were.
        """
        slots = list(_slots_of(models.values()))
        by_key = {slot.key: slot.tensor for slot in slots}
        copies = {key: copy for key in by_key if (copy := self._copies.get(key)) is not None}
        missing = {key: tensor for key, tensor in by_key.items() if key not in copies}
        # One module of them all: they are copied at once.
        holder = torch.nn.Module()
        for number, tensor in enumerate(missing.values()):
            holder._buffers[str(number)] = tensor.detach()
        to_device(holder, str(self._device))
        for key, copy in zip(missing, holder._buffers.values(), strict=True):
            assert copy is not None
            with as_plain_tensors():
                self._alive.add(plain_tensors(copy), _LABEL)
            copies[key] = copy
            if isinstance(key, Home):  # any other key may be another tensor's later
                self._copies[key] = copy
        made = {id(slot.tensor): _like(slot.tensor, copies[slot.key]) for slot in slots}
        for slot in slots:
            slot.tensors[slot.name] = made[id(slot.tensor)]
        return Brought(slots, copies), sum(map(_nbytes_of, missing.values()))


def put_back(brought: Brought) -> None:
    """Give models their tensors on the host again."""
    for slot in brought.slots:
        slot.tensors[slot.name] = slot.tensor


def _like(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return a copy as a parameter if the tensor is one."""
    if not isinstance(tensor, torch.nn.Parameter) or isinstance(copy, torch.nn.Parameter):
        return copy
    made = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
    if type(tensor) is torch.nn.Parameter:
        vars(made).update(vars(tensor))
    return made


def _slots_of(models: Iterable[torch.nn.Module]) -> Iterator[_Slot]:
    homes = homes_in_all()
    for model in models:
        for module in modules_of(model):
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        yield _Slot(tensors, name, tensor, _key_of(tensor, homes))


def _key_of(tensor: torch.Tensor, homes: Homes) -> Hashable:
    """Return what tells a tensor from others: where it lies, or if it was changed there, its id."""
    with as_plain_tensors():
        home = homes.find(tensor)
        return home if home and homes.is_untouched(tensor) else id(tensor)


def _nbytes_of(tensor: torch.Tensor) -> int:
    with as_plain_tensors():
        return sum(part.nbytes for part in plain_tensors(tensor))
