"""Joins tensors of a segment without a copy.

diffusers' converters of files with blocks split a tensor and pass each part to
`torch.cat([part])`, and exchange the halves of some tensors. To copy them is most of the time of
such a load.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shmload._building.mapped import map_ranges
from shmload._host.descriptors import inode_of
from shmload._host.memory import PAGE_NBYTES
from shmload._host.pagemap import is_modified
from shmload._host.procfs import mappings


class Joins(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which `torch.cat` copies less.

    Of one contiguous tensor it gives that tensor's own memory. Several that are whole pages of the
    segment are mapped once more, side by side. It sees the calling thread's operations only.

    Args:
        fd: descriptor of the segment; stays the caller's, and open.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fd = fd
        self._inode = inode_of(os.fstat(fd))

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.cat.default and not kwargs:
            joined = self._join(*args)
            if joined is not None:
                return joined
        return func(*args, **(kwargs or {}))

    def _join(self, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
        """Join tensors without a copy; return None if that is not possible."""
        if not all(each.is_cpu and each.is_contiguous() for each in tensors):
            return None
        if len(tensors) == 1:
            joined: torch.Tensor = torch.ops.aten.alias.default(tensors[0])
            return joined
        kinds = {(each.dtype, each.shape[1:]) for each in tensors}
        offsets = self._offsets(tensors)
        if dim != 0 or len(kinds) != 1 or offsets is None:
            return None
        rows = sum(each.shape[0] for each in tensors)
        mapped = map_ranges(self._fd, [(offset, each.nbytes) for offset, each in offsets])
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        return flat.view(tensors[0].dtype).view(rows, *tensors[0].shape[1:])

    def _offsets(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]] | None:
        """Return where in the segment tensors begin; None if one is not whole pages of it.

        Pages that were written to are not the segment's any more.
        """
        places = [(each.data_ptr(), each.nbytes) for each in tensors]
        if any(nbytes == 0 or (begin | nbytes) % PAGE_NBYTES for begin, nbytes in places):
            return None
        found = []
        mapped = [each for each in mappings({self._inode}) if not is_modified(each)]
        for tensor, (begin, nbytes) in zip(tensors, places, strict=True):
            inside = (each for each in mapped if each.start <= begin <= each.end - nbytes)
            home = next(inside, None)
            if home is None:
                return None
            found.append((home.offset + begin - home.start, tensor))
        return found
