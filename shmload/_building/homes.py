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
import copy
import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shmload._building.device_bytes import Digest, digests, is_equal
from shmload._building.mapped import Spans, map_ranges, modules_of, plain_tensors
from shmload._compat import as_plain_tensors
from shmload._host.descriptors import Inode
from shmload._host.memory import PAGE_NBYTES
from shmload._segments.lease import Lease
from shmload._segments.segment import Segment, attach
from shmload._wording import logger_of

logger = logger_of(__name__)


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
        segments: of the models; stay the caller's. Only those with a name count: nobody shares the
            others.
        spans: where they are mapped.
    """

    def __init__(self, segments: Iterable[Segment], spans: Spans) -> None:
        self._spans = spans
        self._names = {each.inode: each.name for each in segments if each.has_name}
        self._leases: dict[Inode, Lease] = {}
        # By the id of a tensor. Where it lies may change, also by its `data`.
        self._homes: dict[int, tuple[weakref.ref[torch.Tensor], Home]] = {}
        self._digests: dict[Home, Digest] = {}
        self._thread = threading.local()

    def watch(self, model: torch.nn.Module) -> None:
        """Have a model's weights come home when it, or a module of it, moves to the host.

        No class is patched. Each module gets a method of its own, which a copy or a pickle of it
        does not need.
        """
        if self._names:
            for module in modules_of(model):
                own = vars(module)
                parts = type(module), own["_parameters"], own["_buffers"], own["_modules"]
                own["_apply"] = _Apply(self, module, parts)

    @contextlib.contextmanager
    def moving(self, module: torch.nn.Module, *, recurse: bool) -> Iterator[None]:
        """Return a context in which a module moves, and copies nothing that can come home.

        Args:
            module: was watched.
            recurse: whether the modules in it move too.
        """
        if getattr(self._thread, "moves", False):  # a module of one that moves
            yield
            return
        self._thread.moves = True
        try:
            with _Moves(self, module, recurse):
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
        if mapping is None or mapping.inode not in self._names:
            return None
        offset = mapping.offset + tensor.data_ptr() - mapping.start
        return Home(mapping.inode, offset, tensor.dtype, tensor.shape)

    def note(self, tensor: torch.Tensor, home: Home) -> None:
        """Note which weight a tensor is, unless it has another dtype or layout."""
        if _is_plain(tensor) and home.is_of(tensor):
            key, homes = id(tensor), self._homes
            homes[key] = weakref.ref(tensor, lambda _: homes.pop(key, None)), home

    def take_home(self, weights: Iterable[tuple[torch.Tensor, Home]]) -> dict[int, torch.Tensor]:
        """Return what unchanged weights are on the host, by the id of what they are on a device.

        Args:
            weights: on devices.
        """
        by_segment: defaultdict[Inode, list[tuple[torch.Tensor, Home]]] = defaultdict(list)
        for tensor, home in weights:
            by_segment[home.inode].append((tensor, home))
        found = {}
        for inode, there in by_segment.items():
            stored = self._map(inode, [home for _, home in there])
            same = self._are_same(there, stored) if stored else []
            for (tensor, home), on_host, is_same in zip(there, stored, same, strict=False):
                if is_same:
                    self.note(on_host, home)
                    found[id(tensor)] = on_host
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
            mapped = map_ranges(fd, [(begin, end - begin)])
        except OSError:  # this process has all the mappings that it may have
            return []
        finally:
            os.close(fd)
        # Each with a storage of its own, as a copy would have.
        return [
            torch.frombuffer(
                mapped, dtype=home.dtype, count=home.shape.numel(), offset=home.offset - begin
            ).view(home.shape)
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
        found = digests([tensor for tensor, _ in weights])
        for (tensor, home), on_host, digest in zip(weights, stored, found, strict=True):
            # The digest of the segment's own bytes is that of a weight which had the same.
            if home not in self._digests and is_equal(tensor, on_host):
                self._digests[home] = digest
            yield self._digests.get(home) == digest


_COPY = "aten::_to_copy"
# Their result is the same weight. A parameter is made of what `detach` returns.
_SAME_VALUES = _COPY, "aten::detach", "aten::alias"


class _Moves(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which copies of a module's weights to the host map them instead."""

    def __init__(self, homes: Homes, module: torch.nn.Module, recurse: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._homes = homes
        self._module = module
        self._recurse = recurse
        self._found: dict[int, torch.Tensor] | None = None
        # The libraries also move a weight to a device by its `data`, unseen.
        for tensor in self._tensors():
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
            if self._found is None:  # the others that are on a device will follow
                self._found = self._take_home()
            if (on_host := self._found.get(id(tensor))) is not None:
                return on_host
        moved = func(*args, **given)
        if home:
            self._homes.note(moved, home)
        return moved

    def _tensors(self) -> Iterator[torch.Tensor]:
        for each in modules_of(self._module) if self._recurse else (self._module,):
            for tensor in (*each._parameters.values(), *each._buffers.values()):
                if tensor is not None:
                    yield from plain_tensors(tensor)

    def _take_home(self) -> dict[int, torch.Tensor]:
        # The libraries' quantised parameters would make such parameters of all that is computed.
        with as_plain_tensors():
            weights = {
                id(tensor): (tensor, home)
                for tensor in self._tensors()
                if not tensor.is_cpu and (home := self._homes.find(tensor))
            }
            try:
                return self._homes.take_home(weights.values())
            except RuntimeError as exc:  # a device that is full, or cannot compute with integers
                logger.debug("weights are copied to the host: %s", exc)
                return {}


def _is_plain_move_to_host(tensor: torch.Tensor, given: Mapping[str, Any]) -> bool:
    formats = None, torch.preserve_format, torch.contiguous_format
    return (
        torch.device(given.get("device") or tensor.device).type == "cpu"
        and given.get("dtype") in (None, tensor.dtype)
        and given.get("layout") in (None, torch.strided)
        and given.get("memory_format") in formats
        and not given.get("pin_memory")
    )


class _Apply:
    """A module's own `_apply`.

    It refers to the module weakly: one that refers to itself stays until a collection, and its
    segments with it.
    """

    __slots__ = "_homes", "_module", "_parts"

    def __init__(self, homes: Homes, module: torch.nn.Module, parts: tuple[Any, ...]) -> None:
        self._homes = homes
        self._module = weakref.ref(module)
        # A shallow copy has the same ones, and may outlive the module.
        self._parts = parts

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        module = self._module() or self._make_module()
        of_class: Any = type(module)._apply
        with self._homes.moving(module, recurse=recurse):
            return of_class(module, fn, recurse)

    def _make_module(self) -> torch.nn.Module:
        cls, parameters, buffers, modules = self._parts
        module: torch.nn.Module = cls.__new__(cls)
        vars(module).update(_parameters=parameters, _buffers=buffers, _modules=modules)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Apply":
        module = memo.get(id(self._module()))
        parts = copy.deepcopy(self._parts, memo)
        return self if module is None else _Apply(self._homes, module, parts)

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "_apply")  # the class's, where it is unpickled


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is its bytes alone, in a row."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and tensor.numel() > 0
        and tensor.is_contiguous()
    )
