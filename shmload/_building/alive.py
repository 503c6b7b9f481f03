"""Memory of tensors, counted as long as any code of this process refers to it."""

import weakref
from collections.abc import Iterable, Iterator

import torch


class Alive:
    """Tensors whose memory is in use, each with a label."""

    def __init__(self) -> None:
        # Of each storage, the tensors in it by their address: small ones share one on a device.
        self._found: dict[int, dict[int, tuple[str, int]]] = {}

    def add(self, tensors: Iterable[torch.Tensor], label: str) -> int:
        """Count the memory of some tensors until it is free.

        Args:
            tensors: plain ones.
            label: of all of them; what is counted already keeps its own.

        Returns:
            How much was not counted before, in bytes.
        """
        added = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._found:
                self._found[storage._cdata] = {}
                weakref.finalize(storage, self._found.pop, storage._cdata, None).atexit = False
            inside = self._found[storage._cdata]
            if tensor.data_ptr() not in inside:
                inside[tensor.data_ptr()] = label, tensor.nbytes
                added += tensor.nbytes
        return added

    @property
    def labels(self) -> set[str]:
        """The labels of all memory that is in use."""
        return {label for label, _ in self._values()}

    def nbytes(self, label: str) -> int:
        """Return how much memory with a label is in use, in bytes."""
        return sum(size for each, size in self._values() if each == label)

    def _values(self) -> Iterator[tuple[str, int]]:
        for inside in tuple(self._found.values()):
            yield from tuple(inside.values())
