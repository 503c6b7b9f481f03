"""Weights that come back to the host: an unchanged one lies in its segment again.

The libraries' offloading moves weights to a device and back, module by module. A move back copies
them into memory of the process alone, so each process would have a copy after its first run. A
module that was loaded over segments moves otherwise: a weight whose bytes on the device are those
of its segment is mapped from the segment anew, and nothing is copied from the device.

    on the host, in the segment ──to(device)──▶ on the device
               ▲                                      │ to("cpu")
               ├── mapped anew ◀── yes ── has it the segment's bytes?
    on the host, private ◀── copied ◀── no ───────────┘

Guarantee: what comes back has the bytes that were on the device. They are compared there, so it
does not matter what has changed a weight, nor whether torch has counted it.
"""

import os
import secrets
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from shmload._building.mapped import Spans, map_ranges, modules_of
from shmload._host.descriptors import Inode
from shmload._host.memory import PAGE_NBYTES
from shmload._segments.lease import Lease
from shmload._segments.segment import Segment, attach

Apply = Callable[[torch.Tensor], torch.Tensor]
Digest = tuple[int, ...]

# Bytes that are compared at a time: the device must have five times as much to spare.
_CHUNK_NBYTES = 4 << 20
_LANE_NBYTES = 4
# Two independent digests of 64 bits.
_DIGESTS = 2


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


class Homes:
    """Where the weights of some models lie in their segments.

    It takes a lease on a segment when the first weight comes back to it, and keeps it: then the
    program offloads, and will need the segment again.

    Args:
        segments: of the models; stay the caller's. Only those with a name count: nobody shares the
            others.
        spans: where they are mapped.
    """

    def __init__(self, segments: Iterable[Segment], spans: Spans) -> None:
        self._spans = spans
        self._names = {each.inode: each.name for each in segments if each.has_name}
        self._leases: dict[Inode, Lease] = {}
        self._homes: dict[int, tuple[weakref.ref[torch.Tensor], Home]] = {}
        self._digests: dict[Home, Digest] = {}

    def watch(self, model: torch.nn.Module) -> None:
        """Have a model's weights come home when it, or a module of it, moves to the host.

        No class is patched. Each module gets a method of its own, which a copy or a pickle of it
        does not need.
        """
        if self._names:
            apply = _apply_of(self)
            for module in modules_of(model):
                module.__dict__["_apply"] = types.MethodType(apply, module)

    def moving(self, module: torch.nn.Module, move: Apply, *, recurse: bool) -> Apply:
        """Return what to apply to the tensors of a module in place of a function that moves them.

        Args:
            module: it, or a module of it, was watched.
            move: as for `torch.nn.Module._apply`.
            recurse: whether the modules in it move too.
        """
        probe = _Probe(move)
        returning = []
        for tensor in _tensors_of(module, recurse=recurse):
            if tensor.is_cpu:
                self._note(tensor)
            elif (home := self._home_of(tensor)) and probe.keeps(tensor):
                returning.append((tensor, home))
        return _Move(self, move, self._take_home(returning))

    def note(self, tensor: torch.Tensor, home: Home) -> None:
        """Note which weight a tensor is."""
        key, homes = id(tensor), self._homes
        homes[key] = weakref.ref(tensor, lambda _: homes.pop(key, None)), home

    def _note(self, tensor: torch.Tensor) -> None:
        """Note where a tensor on the host lies, if that is in a segment.

        Memory that was mapped after the load may lie at the same address. Then its bytes are not
        the segment's, which is found out before anything comes of it.
        """
        if id(tensor) not in self._homes and _is_plain(tensor):
            mapping = self._spans.find_address(tensor.data_ptr())
            if mapping and mapping.inode in self._names:
                offset = mapping.offset + tensor.data_ptr() - mapping.start
                self.note(tensor, Home(mapping.inode, offset, tensor.dtype, tensor.shape))

    def _home_of(self, tensor: torch.Tensor) -> Home | None:
        known, home = self._homes.get(id(tensor), (None, None))
        is_it = known is not None and known() is tensor and _is_plain(tensor)
        is_same = home is not None and (tensor.dtype, tensor.shape) == (home.dtype, home.shape)
        return home if is_it and is_same else None

    def _take_home(
        self, returning: Iterable[tuple[torch.Tensor, Home]]
    ) -> dict[int, tuple[torch.Tensor, Home]]:
        """Return what unchanged weights are on the host, by the id of what they are on the device.

        Args:
            returning: weights on the device.
        """
        by_segment: defaultdict[Inode, list[tuple[torch.Tensor, Home]]] = defaultdict(list)
        for tensor, home in returning:
            by_segment[home.inode].append((tensor, home))
        found = {}
        for inode, pairs in by_segment.items():
            stored = self._map(inode, [home for _, home in pairs])
            same = self._are_same(pairs, stored) if stored else []
            for (tensor, home), on_host, is_same in zip(pairs, stored, same, strict=False):
                if is_same:
                    found[id(tensor)] = on_host, home
        return found

    def _map(self, inode: Inode, homes: Sequence[Home]) -> list[torch.Tensor]:
        """Map the part of a segment that has some weights anew; none if the segment is gone.

        Each time anew: what the program still has of an earlier mapping stays apart.
        """
        fd = self._open(inode)
        if fd is None:
            return []
        begin = min(home.offset for home in homes) // PAGE_NBYTES * PAGE_NBYTES
        end = max(home.offset + home.nbytes for home in homes)
        try:
            flat = map_ranges(fd, [(begin, end - begin)])
        except OSError:  # this process has all the mappings that it may have
            return []
        finally:
            os.close(fd)
        return [
            flat[home.offset - begin :][: home.nbytes].view(home.dtype).view(home.shape)
            for home in homes
        ]

    def _open(self, inode: Inode) -> int | None:
        """Open a segment, and keep a lease on it; None if it is gone."""
        lease = self._leases.get(inode)
        if lease is None:
            segment = attach(self._names[inode])
            if segment is None:
                return None
            with segment:
                if segment.inode != inode:  # removed, and decoded again
                    return None
                lease = self._leases[inode] = Lease(segment)
        return lease.open_again()

    def _are_same(
        self, weights: Sequence[tuple[torch.Tensor, Home]], stored: Sequence[torch.Tensor]
    ) -> Iterator[bool]:
        """Tell for each weight whether the device has the bytes of its segment."""
        found = _digests([tensor for tensor, _ in weights])
        for (tensor, home), on_host, digest in zip(weights, stored, found, strict=True):
            # The digest of the segment's own bytes is that of a weight which had the same.
            if home not in self._digests and _is_equal(tensor, on_host):
                self._digests[home] = digest
            yield self._digests.get(home) == digest


class _Move:
    """What is applied to each tensor of a module that moves."""

    def __init__(
        self, homes: Homes, move: Apply, found: dict[int, tuple[torch.Tensor, Home]]
    ) -> None:
        self._homes = homes
        self._move = move
        self._found = found

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in self._found:
            moved, home = self._found[id(tensor)]
        else:
            moved, known = self._move(tensor), self._homes._home_of(tensor)
            if known is None or moved is tensor:
                return moved
            home = known
        # A parameter stays the same object, and a buffer does not.
        self._homes.note(moved, home)
        return moved


class _Probe:
    """Finds out what a function makes of tensors, with small ones."""

    def __init__(self, move: Apply) -> None:
        self._move = move
        self._known: dict[tuple[torch.device, torch.dtype, int], bool] = {}

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Tell whether the function brings such a tensor to the host, and changes nothing else."""
        key = tensor.device, tensor.dtype, tensor.dim()
        if key not in self._known:
            self._known[key] = self._try(*key)
        return self._known[key]

    def _try(self, device: torch.device, dtype: torch.dtype, dim: int) -> bool:
        given = torch.arange(2**dim).to(dtype).view((2,) * dim)
        with torch.no_grad():
            on_device = given.to(device)
            made = self._move(on_device)
            on_device.cpu()  # waits, also for a move that does not block
        return (
            type(made) is torch.Tensor
            and made.is_cpu
            and (made.dtype, made.shape) == (dtype, given.shape)
            and made.is_contiguous()
            and torch.equal(made, given)
        )


def _apply_of(homes: Homes) -> Callable[..., torch.nn.Module]:
    # Of this name, so that a pickle has the class's own in its place.
    def _apply(self: torch.nn.Module, fn: Apply, recurse: bool = True) -> torch.nn.Module:
        move = fn if isinstance(fn, _Move) else homes.moving(self, fn, recurse=recurse)
        of_class: Any = type(self)._apply
        moved: torch.nn.Module = of_class(self, move, recurse)
        return moved

    return _apply


def _tensors_of(module: torch.nn.Module, *, recurse: bool) -> Iterator[torch.Tensor]:
    seen = set()
    for each in modules_of(module) if recurse else (module,):
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is its bytes alone, in a row."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.is_contiguous()
    )


# Bytes --------------------------------------------------------------------------------------------


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _is_equal(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    mine, wanted = _bytes_of(tensor), _bytes_of(stored)
    return all(
        torch.equal(mine[at : at + _CHUNK_NBYTES], wanted[at : at + _CHUNK_NBYTES].to(mine.device))
        for at in range(0, mine.numel(), _CHUNK_NBYTES)
    )


def _digests(tensors: Sequence[torch.Tensor]) -> list[Digest]:
    """Return digests of the tensors' bytes, which are computed where the tensors are.

    Each 32 bits are multiplied by a random number of 64 bits that this process alone knows, and
    the products are added (multilinear hashing: Lemire and Kaser, 2014). Other bytes have the same
    digests once in 2**64.
    """
    made = [_digest(tensor) for tensor in tensors]
    # One wait for all.
    return [tuple(each) for each in torch.stack(made).cpu().tolist()] if made else []


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    flat = _bytes_of(tensor)
    count = flat.numel() // _LANE_NBYTES
    factors = _factors(tensor.device)
    head, tail = flat[: count * _LANE_NBYTES], flat[count * _LANE_NBYTES :]
    lanes = (head if _is_aligned(flat) else head.clone()).view(torch.int32)
    places = 256 ** torch.arange(tail.numel(), device=flat.device)
    total = (tail * places).sum() * factors[:, 0]
    step = _CHUNK_NBYTES // _LANE_NBYTES
    for at in range(0, count, step):
        part = lanes[at : at + step].to(torch.int64)
        # Chunks in another order have another digest.
        total = total * _ODD + (part * factors[:, 1 : part.numel() + 1]).sum(1)
    return total


_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


def _is_aligned(flat: torch.Tensor) -> bool:
    return flat.storage_offset() % _LANE_NBYTES == 0


_seed = secrets.randbits(62)
_factors_by_device: dict[torch.device, torch.Tensor] = {}


def _factors(device: torch.device) -> torch.Tensor:
    """Return random numbers, for the last bytes and for each lane of a chunk."""
    found = _factors_by_device.get(device)
    if found is None:
        generator = torch.Generator().manual_seed(_seed)
        shape = (_DIGESTS, _CHUNK_NBYTES // _LANE_NBYTES + 1)
        bounds = -(1 << 63), (1 << 63) - 1
        found = torch.randint(*bounds, shape, dtype=torch.int64, generator=generator).to(device)
        _factors_by_device[device] = found
    return found
