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

import contextlib
import functools
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.__future__ import get_swap_module_params_on_conversion
from torch.utils._python_dispatch import TorchDispatchMode

from shmload._building.device_bytes import Digest, digests_of
from shmload._building.mapped import Spans, map_ranges, modules_of, plain_tensors
from shmload._compat import as_plain_tensors, wrap_moves
from shmload._host.descriptors import Inode
from shmload._host.memory import PAGE_NBYTES
from shmload._segments.lease import Lease
from shmload._segments.segment import Segment, attach
from shmload._wording import logger_of
from shmload.errors import ShmloadError

logger = logger_of(__name__)

Fn = Callable[[torch.Tensor], torch.Tensor]
_watched: "weakref.WeakKeyDictionary[torch.nn.Module, Homes]" = weakref.WeakKeyDictionary()

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
        self._thread = threading.local()

    def watch(self, model: torch.nn.Module) -> None:
        """Have a model's weights come home when it, or a module of it, moves to the host.

        A copy of it moves as ever.
        """
        if self._names:
            _watch_moves()
            for module in modules_of(model):
                _watched.setdefault(module, self)  # else it came from an earlier load

    @contextlib.contextmanager
    def moving(self, module: torch.nn.Module, fn: Fn, *, recurse: bool) -> Iterator[None]:
        """Return a context in which a module moves, and copies nothing that can come home.

        Args:
            module: was watched.
            fn: what is applied to its tensors.
            recurse: whether the modules in it move too.
        """
        if getattr(self._thread, "moves", False):
            yield
            return
        if get_swap_module_params_on_conversion():
            # It refuses tensors with weak references, which `note` takes.
            for tensor in tensors_of(module, recurse=recurse):
                self._homes.pop(id(tensor), None)
            yield
            return
        self._thread.moves = True
        try:
            with _Moves(self, module, fn, recurse=recurse):
                yield
        finally:
            self._thread.moves = False

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


_COPY = "aten::_to_copy"
# Their result is the same weight. A parameter is made of what `detach` returns.
_SAME_VALUES = _COPY, "aten::detach", "aten::alias"


class _Moves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which copies of a module's weights to the host map them instead."""

    def __init__(self, homes: Homes, module: torch.nn.Module, fn: Fn, *, recurse: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._homes = homes
        self._module = module
        self._recurse = recurse
        # torch's own functions move each weight once, and change none before. Of others, each
        # weight is compared when it is copied.
        self._moves_all = getattr(fn, "__module__", "") == torch.nn.Module.__module__
        self._compared: set[int] = set()
        self._found: Found = {}
        # The libraries also move a weight to a device by its `data`, unseen.
        with as_plain_tensors():
            for tensor in tensors_of(module, recurse=recurse):
                if tensor.is_cpu and (home := homes.find(tensor)):
                    homes.note(tensor, home)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if types:  # a tensor that is made of others: its class moves those, which come here too
            return NotImplemented
        if func.name() not in _SAME_VALUES:
            return func(*args, **given)
        (tensor,) = args
        home = self._homes.find(tensor)
        if (
            home
            and not tensor.is_cpu
            and func.name() == _COPY
            and _is_plain_move_to_host(tensor, given)
        ):
            if id(tensor) not in self._compared:
                self._found |= self._take_home(tensor, home)
            _, on_host = self._found.pop(id(tensor), (tensor, None))
            if on_host is not None:
                return on_host
        moved = func(*args, **given)
        if home:
            self._homes.note(moved, home)
        return moved

    def _take_home(self, tensor: torch.Tensor, home: Home) -> Found:
        """Return what a weight is on the host, and what those are that will be copied after it."""
        # The libraries' quantised parameters would make such parameters of all that is computed.
        with as_plain_tensors():
            weights = {id(tensor): (tensor, home)}
            if self._moves_all and not self._compared:
                weights |= {
                    id(each): (each, its)
                    for each in tensors_of(self._module, recurse=self._recurse)
                    if not each.is_cpu and (its := self._homes.find(each))
                }
                self._compared.update(weights)
            try:
                return self._homes.take_home(weights.values())
            # A device that is full, or cannot compute with integers; too many open files.
            except (OSError, RuntimeError, ShmloadError) as exc:
                logger.debug("weights are copied to the host: %s", exc)
                return {}


def tensors_of(module: torch.nn.Module, *, recurse: bool) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of a module, and of those in it."""
    for each in modules_of(module) if recurse else (module,):
        for tensor in (*each._parameters.values(), *each._buffers.values()):
            if tensor is not None:
                yield from plain_tensors(tensor)


def _drop(lease: Lease) -> None:
    """Do nothing: as an argument of a finalizer, the lease lasts until then."""


def _is_plain_move_to_host(tensor: torch.Tensor, given: Mapping[str, Any]) -> bool:
    formats = None, torch.preserve_format, torch.contiguous_format
    return (
        torch.device(given.get("device") or tensor.device).type == "cpu"
        and given.get("dtype") in (None, tensor.dtype)
        and given.get("layout") in (None, torch.strided)
        and given.get("memory_format") in formats
        and not given.get("pin_memory")
    )


@functools.cache
def _watch_moves() -> None:
    """Have each module that moves looked up.

    An attribute of the module would be the first thing that its copies and pickles share. Two
    threads may do it twice: a move that is watched is not watched again.
    """
    wrap_moves(_context_of)


def _context_of(
    module: torch.nn.Module, fn: Fn, recurse: bool
) -> contextlib.AbstractContextManager[None] | None:
    homes = _watched.get(module)
    return homes.moving(module, fn, recurse=recurse) if homes else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is its bytes alone, in a row."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and tensor.is_contiguous()
    )
