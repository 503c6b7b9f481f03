"""Weights that come back to the host: an unchanged one lies in its segment again.

The libraries' offloading moves weights to a device and back, module by module, with
`torch.nn.Module.to`. A move back copies them into memory of the process alone, so each process
would have a copy after its first run. Before a module that was loaded over segments moves back, its
weights whose bytes on the device are those of their segment are mapped from there. Torch then finds
them on the host, and copies the others.

    on the host, in the segment ──to(device)──▶ on the device
               ▲                                      │ to("cpu")
               ├── mapped anew ◀── yes ── has it the segment's bytes?
    on the host, private ◀── copied ◀── no ───────────┘

Guarantee: what is brought home has the bytes that are on the device. They are compared there, so it
does not matter what has changed a weight, nor whether torch has counted it. If both have one
digest, neither is copied to the host.
"""

import functools
import os
import secrets
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from shmload._building.mapped import map_ranges, modules_of
from shmload._compat import as_plain_tensors, wrap_moves
from shmload._host.descriptors import Inode
from shmload._host.memory import PAGE_NBYTES
from shmload._host.procfs import Mappings
from shmload._segments.lease import Lease
from shmload._segments.segment import Segment, attach
from shmload._wording import logger_of
from shmload.errors import ShmloadError

logger = logger_of(__name__)

Digest = tuple[int, ...]
Fn = Callable[[torch.Tensor], torch.Tensor]

# Bytes that are digested at a time: the device must have six times as much to spare.
_CHUNK_NBYTES = 1 << 20
_LANE_NBYTES = 4
# Two independent digests of 64 bits: a changed weight has both with a chance of 2⁻⁶⁶ at most.
_DIGESTS = 2

_secrets: dict[torch.device, torch.Tensor] = {}


def digests_of(tensors: Sequence[torch.Tensor], device: torch.device | None = None) -> list[Digest]:
    """Return digests of tensors' bytes, which are computed on a device.

    Each 32 bits are multiplied by a random number of 64 bits that this process alone knows, and
    the products are added (multilinear hashing: Lemire and Kaser, 2014). The sums of the chunks are
    the coefficients of a polynomial, whose value at another such number is the digest.

    Args:
        tensors: contiguous, on one device.
        device: where to; their own by default.
    """
    made = [_digest(tensor, device or tensor.device) for tensor in tensors]
    # One wait for all.
    return [tuple(each) for each in torch.stack(made).cpu().tolist()] if made else []


def _digest(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    flat = tensor.detach().view(-1).view(torch.uint8)
    count = flat.numel() // _LANE_NBYTES
    head, tail = flat[: count * _LANE_NBYTES], flat[count * _LANE_NBYTES :].to(device)
    if flat.data_ptr() % _LANE_NBYTES or flat.storage_offset() % _LANE_NBYTES:
        head = head.clone()
    lanes = head.view(torch.int32)
    random = _random(device)
    step = _CHUNK_NBYTES // _LANE_NBYTES
    parts = (lanes[at : at + step].to(device) for at in range(0, count, step))
    sums = [(part * random[:, 2 : part.numel() + 2]).sum(1) for part in parts]
    if tail.numel():
        places = 256 ** torch.arange(tail.numel(), device=device)
        sums.append((tail * places).sum() * random[:, 0])
    return functools.reduce(lambda total, each: total * random[:, 1] + each, sums)


def _random(device: torch.device) -> torch.Tensor:
    """Return numbers for the last bytes, for the polynomial, and for each lane of a chunk."""
    found = _secrets.get(device)
    if found is None:
        shape = _DIGESTS, _CHUNK_NBYTES // _LANE_NBYTES + 2
        raw = bytearray(secrets.token_bytes(shape[0] * shape[1] * 8))
        numbers = torch.frombuffer(raw, dtype=torch.int64).view(shape)
        numbers[:, 1] |= 1  # an even one would lose a bit with each chunk
        # If two threads come here at once, both get the numbers of the first.
        found = _secrets.setdefault(device, numbers.to(device))
    return found


class Home(NamedTuple):
    """What a weight is in its segment."""

    inode: Inode
    offset: int
    """In bytes."""
    dtype: torch.dtype
    shape: torch.Size

    @property
    def end(self) -> int:
        """Where it ends in the segment, in bytes."""
        return self.offset + self.shape.numel() * self.dtype.itemsize


class Away(NamedTuple):
    """A weight on a device."""

    tensor: torch.Tensor
    home: Home
    module: torch.nn.Module
    """Whose parameter or buffer it is."""
    key: str


class Homes:
    """Where the weights of some models lie in their segments.

    It takes a lease on a segment when the first weight comes back to it, and keeps it: then the
    program offloads, and will need the segment again.

    Args:
        segments: of the models; stay the caller's. Those without a name do not count: no other
            process has them.
        mappings: of the segments.
    """

    def __init__(self, segments: Iterable[Segment], mappings: Mappings) -> None:
        self._mappings = mappings
        self._names = {each.inode: each.name for each in segments if each.has_name}
        self._leases: dict[Inode, Lease] = {}
        # By the name of a parameter or buffer in its module.
        self._homes: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Home]]
        self._homes = weakref.WeakKeyDictionary()
        self._digests: dict[tuple[Home, torch.device], Digest] = {}

    def __bool__(self) -> bool:
        """Whether a segment has a name."""
        return bool(self._names)

    def look(self, module: torch.nn.Module) -> list[Away]:
        """Note where the weights of a module alone lie; return those that are on devices.

        What is noted may be wrong: a weight was changed, or other memory lies where it was.
        """
        homes, away = self._homes.setdefault(module, {}), []
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is None or not _is_plain(tensor):
                    continue
                home = homes.get(key)
                if tensor.is_cpu:
                    # Once it came home, it lies in a mapping that is none of those.
                    if not home and (home := self._find(tensor)):
                        homes[key] = home
                elif home and (home.dtype, home.shape) == (tensor.dtype, tensor.shape):
                    away.append(Away(tensor, home, module, key))
        return away

    def adopt(self, module: torch.nn.Module, other: torch.nn.Module) -> None:
        """Note for a module what is so for another, on the host."""
        self.look(other)
        self._homes[module] = dict(self._homes[other])

    def bring(self, weights: Iterable[Away]) -> None:
        """Map weights from their segments that are unchanged on their devices."""
        groups: defaultdict[tuple[Inode, torch.device], list[Away]] = defaultdict(list)
        for each in weights:
            groups[each.home.inode, each.tensor.device].append(each)
        for (inode, device), group in groups.items():
            on_host = self._map(inode, [each.home for each in group])
            digests = digests_of([each.tensor for each in group]) if on_host else []
            for each, mapped, digest in zip(group, on_host, digests, strict=False):
                if self._digest_of(each.home, mapped, device) != digest:
                    continue
                # As a move by torch: a parameter stays the same object, a buffer does not.
                if isinstance(each.tensor, torch.nn.Parameter):
                    each.tensor.data = mapped
                else:
                    each.module._buffers[each.key] = mapped

    def _find(self, tensor: torch.Tensor) -> Home | None:
        """Return where a tensor on the host lies; None if that is in no segment."""
        begin = tensor.data_ptr()
        mapping = self._mappings.at(begin)
        if not mapping or mapping.inode not in self._names or begin + tensor.nbytes > mapping.end:
            return None
        offset = mapping.offset + begin - mapping.start
        return Home(mapping.inode, offset, tensor.dtype, tensor.shape)

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
        try:
            mapped = map_ranges(fd, [(begin, max(home.end for home in homes) - begin)])
        finally:
            os.close(fd)
        # With this the lease lasts as long as the mapping, which may outlast the modules.
        weakref.finalize(mapped, lease.touch).atexit = False
        # Each with a storage of its own, as a copy would have.
        return [
            torch.frombuffer(
                mapped, dtype=home.dtype, count=home.shape.numel(), offset=home.offset - begin
            ).view(home.shape)
            for home in homes
        ]

    def _lease(self, inode: Inode) -> Lease | None:
        """Return a lease on a segment, which is kept; None if the segment is gone."""
        if inode not in self._leases:
            segment = attach(self._names[inode])
            if segment is None:
                return None
            with segment:
                if segment.inode != inode:  # removed, and decoded again
                    return None
                self._leases[inode] = Lease(segment)
        return self._leases[inode]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is its bytes alone, in a row."""
    return (
        not hasattr(tensor, "__tensor_flatten__")
        and tensor.layout == torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and tensor.is_contiguous()
    )


# Moves --------------------------------------------------------------------------------------------

_watched: "weakref.WeakKeyDictionary[torch.nn.Module, Homes]" = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    """Whether a thread moves a module now: torch moves the modules in it one by one."""

    is_moving = False


_thread = _Thread()


def watch(model: torch.nn.Module, homes: Homes) -> None:
    """Have a model's weights come home when it, or a module of it, moves to the host.

    A copy of it moves as ever.
    """
    _watch_moves()
    for module in modules_of(model):
        _watched.setdefault(module, homes)  # else it came from an earlier load


def adopt(module: torch.nn.Module, other: torch.nn.Module) -> None:
    """Have the weights of a module come home to where those of another lie.

    Args:
        module: it has the other's weights now, on the host or on a device.
        other: is of what a load has returned; on the host.
    """
    homes = _watched.get(other)
    if homes is None:
        _watched.pop(module, None)
    else:
        _watched[module] = homes
        homes.adopt(module, other)


@functools.cache
def _watch_moves() -> None:
    """Have each module that moves looked up.

    An attribute of the module would be the first thing that its copies and pickles share. Two
    threads may do it twice: the inner one finds that the module moves already.
    """
    wrap_moves(_move)


def _move(of_torch: Callable[..., Any], module: torch.nn.Module, fn: Fn, recurse: bool) -> Any:
    """Apply a function to the tensors of a module, as torch does; first bring weights home."""
    if module not in _watched or _thread.is_moving:
        return of_torch(module, fn, recurse)
    _thread.is_moving = True
    try:
        _bring_home(modules_of(module) if recurse else [module], fn)
        return of_torch(module, fn, recurse)
    finally:
        _thread.is_moving = False


def _bring_home(modules: Iterable[torch.nn.Module], fn: Fn) -> None:
    """Map the weights that a function would copy to the host, and that are unchanged.

    Args:
        modules: of weights on the host it is noted where they lie.
        fn: the function.
    """
    away: defaultdict[Homes, list[Away]] = defaultdict(list)
    # The libraries' quantised parameters would make such parameters of all that is computed.
    with as_plain_tensors():
        for module in modules:
            if homes := _watched.get(module):
                away[homes] += homes.look(module)
    # Only torch's own functions are known to do nothing but move.
    if getattr(fn, "__module__", "") != torch.nn.Module.__module__:
        return

    @functools.cache
    def is_copied_to_host(device: torch.device, dtype: torch.dtype) -> bool:
        moved = fn(torch.empty(0, dtype=dtype, device=device))
        return moved.is_cpu and moved.dtype == dtype

    try:
        for homes, weights in away.items():
            coming = [
                each for each in weights if is_copied_to_host(each.tensor.device, each.home.dtype)
            ]
            with as_plain_tensors():
                homes.bring(coming)
    # A device that is full, or cannot compute with integers; too many open files.
    except (OSError, RuntimeError, ShmloadError) as exc:
        logger.debug("weights are copied to the host: %s", exc)
