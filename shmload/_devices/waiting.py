"""Brings weights that wait on the host to a device, a block at a time, when they compute.

A block is a module whose weights travel together. While it computes, the block that came after it
the last time is copied from locked pages:

      host    enter 1            leave 1, enter 2           leave 2, enter 3
      copies  copy 1, copy 2     copy 3, behind block 1     copy 1, behind block 2
      device  copy 1 > block 1   copy 2 > block 2           copy 3 > block 3

Each copy goes to memory of its own, which torch's allocator has from the block before the last one.
Weights that are not in locked pages are copied when their block is entered, through slots as in any
upload.

Guarantee: between two passes a module has its own parameters, on the host, also after an error.
"""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn, Self

import torch
from torch import nn

from shmload._devices.moves import Move
from shmload._devices.origin import Origin
from shmload._devices.upload import Upload
from shmload._runtimes.runtime import ALIGNMENT_NBYTES, Runtime
from shmload._wording import logger_of
from shmload.errors import ArgumentError

logger = logger_of(__name__)


class _Weight(NamedTuple):
    """A parameter on the host, and where a module has it."""

    holder: nn.Module
    name: str
    tensor: nn.Parameter


class _Block:
    """One module whose weights travel together.

    Args:
        root: the module; weakly held.
        origins: that hold its weights, or some of them.
    """

    def __init__(self, root: nn.Module, origins: Sequence[Origin]) -> None:
        self._root = weakref.ref(root)
        self.origins = origins
        self.calls: Counter[int] = Counter()
        """How many calls of its modules are under way, by the thread that called."""
        self.bound: list[tuple[_Weight, nn.Parameter]] = []
        """Its weights, each with the parameter that stands for it on the device."""
        self.memory: tuple[torch.Tensor, ...] = ()
        """The device's memory that they lie in."""
        self.following: weakref.ref[_Block] | None = None
        """The block that came next the last time."""

    def weights(self) -> list[_Weight]:
        """Return its parameters that are on the host: adapters may have come, others gone."""
        root = self._root()
        return [
            _Weight(holder, name, tensor)
            for holder in (root.modules() if root else ())
            for name, tensor in holder._parameters.items()
            if tensor is not None and tensor.is_cpu
        ]


_Key = tuple[int, int, torch.dtype]  # address, size and dtype of a weight


class _Layout:
    """Where weights lie in memory of the device, which is written at once.

    Args:
        tensors: consecutive bytes each.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.offsets: dict[_Key, int] = {}
        """Where each weight begins, in bytes."""
        self._tensors: list[torch.Tensor] = []
        self.nbytes = 0
        """Size of all, in bytes, with the gaps between them."""
        for tensor in tensors:
            if _key(tensor) not in self.offsets:
                self.offsets[_key(tensor)] = self.nbytes
                self._tensors.append(tensor)
                self.nbytes += tensor.nbytes + -tensor.nbytes % ALIGNMENT_NBYTES

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield each weight, with its offset in bytes."""
        return zip(self.offsets.values(), self._tensors, strict=True)

    def view(self, memory: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """Return a weight in the memory."""
        offset = self.offsets[_key(tensor)]
        flat = memory[offset : offset + tensor.nbytes]
        return flat.view(tensor.dtype).view(tensor.shape)


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.data_ptr(), tensor.numel(), tensor.dtype


class _Ahead(NamedTuple):
    """Weights of a block that were copied before it is entered."""

    block: "weakref.ref[_Block]"
    offsets: dict[_Key, int]
    """Where each of them lies."""
    memory: torch.Tensor


class Waiting:
    """The blocks that wait for one device.

    Several threads may use it. A copy of a module that uses it may use it too.

    Args:
        runtime: of the device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._lock = threading.Lock()
        self._blocks: weakref.WeakKeyDictionary[nn.Module, _Block] = weakref.WeakKeyDictionary()
        # The block that each thread entered last; under None the block that was added last.
        self._last: dict[int | None, weakref.ref[_Block]] = {}
        self._ahead: _Ahead | None = None
        self._is_full = False  # the device, for more than one block
        self._upload: Upload | None = None
        self._close_upload: Callable[[], object] = lambda: None

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise ArgumentError(
            "a model whose weights wait for an accelerator cannot be pickled; call "
            "reset_device_map() on its pipeline first, or pass a handle of shmload.share() instead"
        )

    def add(self, root: nn.Module, origins: Sequence[Origin]) -> None:
        """Note a block; the next one that is added is expected to follow it.

        Args:
            root: the module. A block that is used without this has none.
            origins: that hold weights of it; unlocked when the module dies.
        """
        with self._lock:
            self._blocks[root] = block = _Block(root, origins)
            self._note_use(block, None)

    @contextlib.contextmanager
    def using(self, root: nn.Module) -> Iterator[None]:
        """Have a block's weights on the device; a context. Calls of one block may overlap.

        Raises:
            torch.OutOfMemoryError: the device is full.
            RuntimeError: a driver failed.
        """
        caller = threading.get_ident()
        with self._lock:
            block = self._blocks.get(root)
            if block is None:
                self._blocks[root] = block = _Block(root, ())
            if not block.calls:
                self._bind(block)
            block.calls[caller] += 1
        try:
            if block.calls[caller] == 1:
                with self._lock:
                    self._join()
                    for memory in block.memory:
                        self.runtime.keep(memory)
                    self._note_use(block, caller)
                    self._look_ahead(block)
            yield
        finally:
            with self._lock:
                self._leave(block, caller)

    def release(self) -> None:
        """Free what was copied ahead and unlock all pages, until a block is used again."""
        with self._lock:
            self.runtime.drain()
            for block in list(self._blocks.values()):
                for origin in block.origins:
                    origin.unlock()
            self._ahead = self._upload = None
            self._is_full = False
            self._close_upload()

    # With the lock held ---------------------------------------------------------------------------

    def _note_use(self, block: _Block, caller: int | None) -> None:
        """Note that a block is used, and followed the one that this caller used before."""
        last = self._last[caller]() if caller in self._last else None
        if last is not None and last is not block:
            last.following = weakref.ref(block)
        self._last[caller] = weakref.ref(block)

    def _join(self) -> None:
        try:
            self.runtime.join()
        except BaseException:  # the memory is freed now, and no copy may reach it then
            self.runtime.drain()
            raise

    def _leave(self, block: _Block, caller: int) -> None:
        block.calls[caller] -= 1
        if block.calls[caller]:
            return
        del block.calls[caller]
        if not block.calls:
            self._unbind(block)

    def _bind(self, block: _Block) -> None:
        """Put parameters on the device in the place of a block's own."""
        weights = block.weights()
        tensors = {id(weight.tensor): weight.tensor for weight in weights}
        try:
            made = self._bring(block, list(tensors.values()))
        except BaseException:
            # Copies that have begun end before their memory is freed.
            try:
                self.runtime.drain()
            finally:
                self._unbind(block)
            raise
        for weight in weights:
            weight.holder._parameters[weight.name] = made[id(weight.tensor)]
            block.bound.append((weight, made[id(weight.tensor)]))

    def _unbind(self, block: _Block) -> None:
        for weight, stand_in in block.bound:
            if weight.holder._parameters.get(weight.name) is stand_in:
                weight.holder._parameters[weight.name] = weight.tensor
        block.bound.clear()
        block.memory = ()

    def _bring(self, block: _Block, tensors: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
        """Return parameters on the device, by the `id` of the block's own; copies have begun."""
        clean = [origin for origin in self._locked(block) if origin.is_clean]
        there = _Layout(each for each in tensors if _origin_of(each, clean))
        rest = _Layout(
            each for each in tensors if _key(each) not in there.offsets and _is_flat(each)
        )
        ahead = self._ahead
        if ahead and ahead.block() is block and ahead.offsets == there.offsets:
            of_pages, self._ahead = ahead.memory, None
        else:
            self._drop_ahead()
            of_pages = self._fetch(there, clean)
        of_slots = self._through_slots(rest)
        block.memory = of_pages, of_slots
        made: dict[int, nn.Parameter] = {}
        for tensor in tensors:
            if _key(tensor) in there.offsets:
                target = there.view(of_pages, tensor)
            elif _key(tensor) in rest.offsets:
                target = rest.view(of_slots, tensor)
            else:
                target = tensor.detach().to(self.runtime.device)
            made[id(tensor)] = nn.Parameter(target, requires_grad=tensor.requires_grad)
        return made

    def _locked(self, block: _Block) -> list[Origin]:
        """Lock a block's origins; returns those that are locked."""
        return [origin for origin in block.origins if origin.lock(self.runtime)]

    def _fetch(self, layout: _Layout, origins: Sequence[Origin]) -> torch.Tensor:
        """Return new memory of the device; weights in locked pages are on their way there."""
        memory = self._allocate(layout.nbytes)
        copies = []
        for offset, tensor in layout:
            origin = _origin_of(tensor, origins)
            assert origin
            copies.append((memory[offset : offset + tensor.nbytes], origin.source(tensor)))
        if copies:
            self.runtime.copy(copies)
        return memory

    def _through_slots(self, layout: _Layout) -> torch.Tensor:
        """Return new memory of the device; weights of this process are on their way there."""
        memory = self._allocate(layout.nbytes)
        if not layout.nbytes:
            return memory
        if self._upload is None or self._upload.is_small_for(layout.nbytes):
            self._close_upload()
            self._upload = Upload(layout.nbytes, self.runtime)
            self._close_upload = close = weakref.finalize(self, self._upload.close)
            close.atexit = False  # the end of the process releases all
        self._upload.copy(
            Move(tensor.data_ptr(), tensor.nbytes, self.runtime, memory, offset)
            for offset, tensor in layout
        )
        return memory

    def _look_ahead(self, current: _Block) -> None:
        """Start to copy the block that is likely to follow the current one."""
        block = current.following() if current.following else None
        is_ahead = self._ahead is not None and self._ahead.block() is block
        if block is None or block.calls or self._is_full or is_ahead:
            return
        self._drop_ahead()
        origins = self._locked(block)
        layout = _Layout(w.tensor for w in block.weights() if _origin_of(w.tensor, origins))
        try:
            memory = self._fetch(layout, origins)
        except torch.OutOfMemoryError:  # the block is copied when it is used
            logger.info("%s has no room for a second block", self.runtime.name)
            self.runtime.drain()
            self._is_full = True
        else:
            self._ahead = _Ahead(weakref.ref(block), layout.offsets, memory)

    def _drop_ahead(self) -> None:
        """Free what was copied ahead for a block that did not come."""
        if self._ahead:
            self._join()  # what gets this memory next must not be written over
            self._ahead = None

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        with torch.inference_mode(False):  # such memory may be written to only in this mode
            memory = self.runtime.empty(nbytes)
        self.runtime.follow()  # what had this memory before may still be in use
        return memory


def _origin_of(tensor: torch.Tensor, origins: Iterable[Origin]) -> Origin | None:
    """Return the origin that holds a weight."""
    return next((each for each in origins if each.holds(tensor)), None)


def _is_flat(tensor: torch.Tensor) -> bool:
    """Tell whether a weight is nothing but consecutive bytes."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
