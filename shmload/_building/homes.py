"""Weights that come back to the host: an unchanged one lies in its segment again.

The libraries' offloading moves weights to a device and back, module by module. A move back copies
them into memory of the process alone, so each process would have a copy after its first run. Here a
module that was loaded over segments moves otherwise: a weight whose bytes on the device are those
of its segment is mapped from the segment anew, and nothing is copied from the device.

Guarantee: what comes back has the bytes that were on the device. They are compared on the device,
so it does not matter what has changed a weight, nor whether torch has counted it.
"""

import contextlib
import mmap
import os
import secrets
import types
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from shmload._building.mapped import Spans, modules_of
from shmload._host.descriptors import Descriptor, Inode
from shmload._host.shm import reopen
from shmload._segments.lease import Lease
from shmload._segments.segment import Segment, attach

# Bytes that are compared at a time: so much memory the device must have to spare, three times.
_CHUNK_NBYTES = 16 << 20
_LANE = torch.int32

Apply = Callable[[torch.Tensor], torch.Tensor]


class Place(NamedTuple):
    """Where a weight's bytes are in a segment."""

    inode: Inode
    offset: int
    """In bytes."""
    nbytes: int


class Home(NamedTuple):
    """What a weight is in its segment."""

    place: Place
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class Homes:
    """The segments of some models, and where their weights lie in them.

    Args:
        segments: of the models; stay the caller's.
        spans: where they are mapped.
    """

    def __init__(self, segments: Iterable[Segment], spans: Spans) -> None:
        self._spans = spans
        self._names: dict[Inode, str] = {}
        self._held: dict[Inode, Descriptor] = {}
        """Open files of segments without a name, which are gone otherwise."""
        for segment in segments:
            if segment.has_name:
                self._names[segment.inode] = segment.name
        self._homes: dict[int, tuple[weakref.ref[torch.Tensor], Home]] = {}
        self._digests: dict[tuple[Place, torch.dtype], int] = {}

    def watch(self, model: torch.nn.Module) -> None:
        """Have a model's weights come home when the model, or a module of it, moves to the host."""
        apply = _apply_of(self)
        for module in modules_of(model):
            module.__dict__["_apply"] = types.MethodType(apply, module)

    def moving(self, module: torch.nn.Module, fn: Apply, *, recurse: bool) -> "_Move":
        """Return what to apply to the tensors of a module in place of `fn`."""
        returning: list[tuple[torch.Tensor, Home]] = []
        moves = _Probe(fn)
        for tensor in _own_tensors(module, recurse=recurse):
            if tensor.device.type == "cpu":
                self._note(tensor)
            elif (home := self._home_of(tensor)) and moves.come_to_host(tensor):
                returning.append((tensor, home))
        return _Move(fn, self._take_home(returning))

    def _note(self, tensor: torch.Tensor) -> None:
        """Note where a tensor on the host lies, if that is in a segment."""
        if id(tensor) in self._homes or not _is_plain(tensor):
            return
        mapping = self._spans.find_address(tensor.data_ptr())
        if mapping is None:
            return
        offset = mapping.offset + tensor.data_ptr() - mapping.start
        place = Place(mapping.inode, offset, tensor.numel() * tensor.itemsize)
        key, homes = id(tensor), self._homes
        forget = weakref.ref(tensor, lambda _: homes.pop(key, None))
        homes[key] = forget, Home(place, tensor.dtype, tensor.shape, tensor.stride())

    def _home_of(self, tensor: torch.Tensor) -> Home | None:
        found = self._homes.get(id(tensor))
        if found is None or found[0]() is not tensor or not _is_plain(tensor):
            return None
        _, home = found
        is_same = (tensor.dtype, tensor.shape, tensor.stride()) == home[1:]
        return home if is_same else None

    def _take_home(self, returning: list[tuple[torch.Tensor, Home]]) -> dict[int, torch.Tensor]:
        """Return what unchanged weights are on the host, by the weight's id."""
        by_segment: defaultdict[Inode, list[tuple[torch.Tensor, Home]]] = defaultdict(list)
        for tensor, home in returning:
            by_segment[home.place.inode].append((tensor, home))
        found: dict[int, torch.Tensor] = {}
        for inode, pairs in by_segment.items():
            first = min(home.place.offset for _, home in pairs)
            last = max(home.place.offset + home.place.nbytes for _, home in pairs)
            mapped = self._map(inode, first, last)
            if mapped is None:
                continue
            begin, flat = mapped
            stored = [
                flat[home.place.offset - begin :][: home.place.nbytes].view(home.dtype)
                for _, home in pairs
            ]
            same = self._are_same([(t, h, s) for (t, h), s in zip(pairs, stored, strict=True)])
            for (tensor, home), on_host, is_same in zip(pairs, stored, same, strict=True):
                if is_same:
                    found[id(tensor)] = torch.as_strided(on_host, home.shape, home.stride)
        return found

    def _map(self, inode: Inode, first: int, last: int) -> tuple[int, torch.Tensor] | None:
        """Map a range of a segment anew: its begin in the segment, and its bytes."""
        name = self._names.get(inode)
        segment = attach(name) if name else None
        with contextlib.ExitStack() as closing:
            if segment is None:
                return None
            closing.callback(segment.close)
            if segment.inode != inode:
                return None
            lease = Lease(segment) if segment.is_shared else None
            fd = reopen(segment.fd) if lease else segment.fd
            if lease:
                closing.callback(os.close, fd)
            begin = first - first % mmap.ALLOCATIONGRANULARITY
            pages = mmap.mmap(fd, last - begin, access=mmap.ACCESS_COPY, offset=begin)
            flat = torch.frombuffer(pages, dtype=torch.uint8)
            if lease:
                weakref.finalize(flat.untyped_storage(), lease.close).atexit = False
            return begin, flat

    def _are_same(self, weights: list[tuple[torch.Tensor, Home, torch.Tensor]]) -> list[bool]:
        """Tell for each weight whether the device has the bytes of its segment."""
        known = [self._digests.get((home.place, home.dtype)) for _, home, _ in weights]
        digests = list(_digests([tensor for tensor, *_ in weights]))
        same = []
        for (tensor, home, stored), wanted, digest in zip(weights, known, digests, strict=True):
            if wanted is None:
                is_same = _is_equal(tensor, stored)
                if is_same:
                    self._digests[home.place, home.dtype] = digest
            else:
                is_same = digest == wanted
            same.append(is_same)
        return same


class _Move:
    """What is applied to each tensor of a module that moves."""

    def __init__(self, fn: Apply, homes: dict[int, torch.Tensor]) -> None:
        self._fn = fn
        self._homes = homes

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        home = self._homes.get(id(tensor))
        return self._fn(tensor) if home is None else home


class _Probe:
    """Finds out where a function moves tensors, with empty ones."""

    def __init__(self, fn: Apply) -> None:
        self._fn = fn
        self._known: dict[tuple[torch.device, torch.dtype], bool] = {}

    def come_to_host(self, tensor: torch.Tensor) -> bool:
        """Tell whether such a tensor comes to the host as it is."""
        key = tensor.device, tensor.dtype
        if key not in self._known:
            with torch.no_grad():
                made = self._fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            self._known[key] = (made.device.type, made.dtype) == ("cpu", tensor.dtype)
        return self._known[key]


def _apply_of(homes: Homes) -> Callable[..., torch.nn.Module]:
    # Of this name, so that pickle finds the class's own in its place.
    def _apply(self: torch.nn.Module, fn: Apply, recurse: bool = True) -> torch.nn.Module:
        move = fn if isinstance(fn, _Move) else homes.moving(self, fn, recurse=recurse)
        moved: torch.nn.Module = type(self)._apply(self, move, recurse)
        return moved

    return _apply


def _own_tensors(module: torch.nn.Module, *, recurse: bool) -> Iterator[torch.Tensor]:
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
    flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _is_equal(tensor: torch.Tensor, stored: torch.Tensor) -> bool:
    mine, wanted = _bytes_of(tensor), stored.view(torch.uint8)
    return all(
        torch.equal(mine[at : at + _CHUNK_NBYTES], wanted[at : at + _CHUNK_NBYTES].to(mine.device))
        for at in range(0, mine.numel(), _CHUNK_NBYTES)
    )


_seed = secrets.randbits(62)


def _digests(tensors: list[torch.Tensor]) -> Iterator[int]:
    """Yield a number of each tensor's bytes; different bytes have the same one once in 2**33.

    Each 32 bits are multiplied by a random number of 64 bits that this process alone knows, and
    the products are added (multilinear hashing: Lemire and Kaser, 2014).
    """
    if not tensors:
        return
    device = tensors[0].device
    count = min(max(map(_nbytes, tensors)), _CHUNK_NBYTES) // 4 + 1
    factors = _factors(count, device)
    sums = torch.stack([_digest(tensor, factors) for tensor in tensors])
    yield from sums.cpu().tolist()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _digest(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    flat = _bytes_of(tensor)
    whole = flat.numel() // 4 * 4
    is_aligned = flat.storage_offset() % 4 == 0
    lanes = flat[:whole].view(_LANE) if is_aligned else flat[:whole].clone().view(_LANE)
    places = 256 ** torch.arange(flat.numel() - whole, device=flat.device)
    total = (flat[whole:] * places).sum() * factors[0]
    step = _CHUNK_NBYTES // 4
    for number, at in enumerate(range(0, lanes.numel(), step)):
        part = lanes[at : at + step].to(torch.int64)
        total = total * (0x9E3779B97F4A7C15 - (1 << 64)) if number else total
        total = total + (part * factors[: part.numel()]).sum()
    return total


def _factors(count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_seed)
    made = torch.randint(
        -(1 << 63), (1 << 63) - 1, (count,), dtype=torch.int64, generator=generator
    )
    return made.to(device)
