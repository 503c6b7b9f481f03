"""Where the weights of loaded models lie in their segments, and how one lies there again.

Guarantee: what `take_home` returns has the bytes that are on the device. They are compared there,
so it does not matter what has changed a weight, nor whether torch has counted it.
"""

import os
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from shmload._building.device_bytes import Digest, digests_of
from shmload._building.mapped import Spans, map_ranges
from shmload._host.descriptors import Inode
from shmload._host.memory import PAGE_NBYTES
from shmload._segments.lease import Lease
from shmload._segments.segment import Segment, attach

Found = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By the id of a weight on a device: itself, which keeps the id, and what it is on the host."""


class Home(NamedTuple):
    """What a weight is in its segment."""

    inode: Inode
    offset: int
    """In bytes."""
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        """Its length in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has the dtype and the shape."""
        return (self.dtype, self.shape) == (tensor.dtype, tensor.shape)


class Homes:
    """Where the weights of some models lie in their segments.

    It takes a lease on a segment when the first weight comes back to it, and keeps it: then the
    program offloads, and will need the segment again.

    Args:
        segments: of the models; stay the caller's. Those without a name do not count: no other
            process has them.
        spans: where they are mapped.
    """

    def __init__(self, segments: Iterable[Segment], spans: Spans) -> None:
        self._spans = spans
        self._names = {each.inode: each.name for each in segments if each.has_name}
        self._leases: dict[Inode, Lease] = {}
        # By the id of a tensor. Where it lies may change, also by its `data`.
        self._homes: dict[int, tuple[weakref.ref[torch.Tensor], Home]] = {}
        self._digests: dict[tuple[Home, torch.device], Digest] = {}

    def __bool__(self) -> bool:
        """Whether a segment has a name."""
        return bool(self._names)

    def find(self, tensor: torch.Tensor) -> Home | None:
        """Return which weight a tensor is, or was when it was moved to where it lies.

        Other memory may lie at the same address by now, and the weight may be changed: both are
        found out before anything comes of it.
        """
        if not _is_plain(tensor):
            return None
        known, home = self._homes.get(id(tensor), (None, None))
        if known is not None and home is not None and known() is tensor:
            return home if home.is_of(tensor) else None
        mapping = self._spans.find_address(tensor.data_ptr()) if tensor.is_cpu else None
        if (
            mapping is None
            or mapping.inode not in self._names
            or tensor.data_ptr() + tensor.nbytes > mapping.end
        ):
            return None
        offset = mapping.offset + tensor.data_ptr() - mapping.start
        return Home(mapping.inode, offset, tensor.dtype, tensor.shape)

    def note(self, tensor: torch.Tensor, home: Home) -> None:
        """Note which weight a tensor is, unless it has another dtype or layout."""
        if _is_plain(tensor) and home.is_of(tensor):
            key, homes = id(tensor), self._homes
            homes[key] = weakref.ref(tensor, lambda _: homes.pop(key, None)), home

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget what was noted of a tensor."""
        self._homes.pop(id(tensor), None)

    def take_home(self, weights: Iterable[tuple[torch.Tensor, Home]]) -> Found:
        """Return what unchanged weights are on the host.

        Args:
            weights: on devices.
        """
        groups: defaultdict[Any, list[tuple[torch.Tensor, Home]]] = defaultdict(list)
        for tensor, home in weights:
            groups[home.inode, tensor.device].append((tensor, home))
        found = {}
        for (inode, _), group in groups.items():
            on_host = self._map(inode, [home for _, home in group])
            if on_host:
                digests = digests_of([tensor for tensor, _ in group])
                for (tensor, home), mapped, digest in zip(group, on_host, digests, strict=True):
                    if self._digest_of(home, mapped, tensor.device) == digest:
                        self.note(mapped, home)
                        found[id(tensor)] = tensor, mapped
        return found

    def _digest_of(self, home: Home, mapped: torch.Tensor, device: torch.device) -> Digest:
        """Return the digest of a segment's own bytes, which go to a device for it once."""
        key = home, device
        if key not in self._digests:
            self._digests[key] = digests_of([mapped], device)[0]
        return self._digests[key]

    def _map(self, inode: Inode, homes: Sequence[Home]) -> list[torch.Tensor]:
        """Map the part of a segment that has some weights anew; none if the segment is gone.

        Each time anew: what the program still has of an earlier mapping stays apart.
        """
        lease = self._lease(inode)
        fd = None if lease is None else lease.open_again()
        if lease is None or fd is None:
            return []
        begin = min(home.offset for home in homes) // PAGE_NBYTES * PAGE_NBYTES
        end = max(home.offset + home.nbytes for home in homes)
        try:
            mapped = map_ranges(fd, [(begin, end - begin)])
        finally:
            os.close(fd)
        # The lease lasts as long as the mapping, which may outlast the modules.
        weakref.finalize(mapped, _drop, lease).atexit = False
        # Each with a storage of its own, as a copy would have.
        return [
            torch.frombuffer(
                mapped, dtype=home.dtype, count=home.shape.numel(), offset=home.offset - begin
            ).view(home.shape)
            for home in homes
        ]

    def _lease(self, inode: Inode) -> Lease | None:
        """Return a lease on a segment, which is kept; None if the segment is gone."""
        lease = self._leases.get(inode)
        if lease is None:
            segment = attach(self._names[inode])
            if segment is None:
                return None
            with segment:
                if segment.inode != inode:  # removed, and decoded again
                    return None
                lease = self._leases[inode] = Lease(segment)
        return lease


def _drop(lease: Lease) -> None:
    """Do nothing: as an argument of a finalizer, the lease lasts until then."""


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is its bytes alone, in a row."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and tensor.is_contiguous()
    )
