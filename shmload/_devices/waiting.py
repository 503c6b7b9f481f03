"""Brings weights that wait on the host to a device, a block at a time, when they compute.

A block is a module whose weights travel together. While it computes, the block that came after it
the last time is copied: to the other of two buffers, which the device fetches from pinned pages.

      host    enter 1            leave 1, enter 2           leave 2, enter 3
      lane    copy 1, copy 2     copy 3, behind block 1     copy 1, behind block 2
      device  copy 1 > block 1   copy 2 > block 2           copy 3 > block 3

Weights that are not in pinned pages are copied when their block is entered, and so are all where
gradients are on: there each pass has memory of its own, which lives as long as autograd needs it.

Guarantee: between two passes a module has its own parameters, on the host, also after an error.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import NoReturn, Self

import torch
from torch import nn

from shmload._devices.block import Block, Layout, Turns
from shmload._devices.origin import Origin
from shmload._runtimes.runtime import Runtime, drain
from shmload._wording import logger_of
from shmload.errors import ArgumentError

logger = logger_of(__name__)

_BUFFERS = 2
_LANES = itertools.count(64)  # not those that uploads use


class Waiting:
    """The blocks that wait for one device, and the buffers there that they share.

    Several threads may use it. A copy of a module that uses it may use it too.

    Args:
        runtime: of the device.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._lane = next(_LANES)
        self._lock = threading.Lock()
        self._turns = Turns(_BUFFERS)
        self._blocks: dict[int, Block] = {}
        self._memory: list[torch.Tensor | None] = [None] * _BUFFERS
        self._loaded: list[Layout | None] = [None] * _BUFFERS
        self._buffer_nbytes = 0
        self._lacking: list[int] = []  # buffers without room on the device, until `release`
        self._gone: list[int] = []
        self._is_holding = False  # pages or buffers, since the last `release`

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
            origins: that hold weights of it; unpinned when the module dies.
        """
        with self._locked():
            if self._blocks:
                self._turns.expect(next(reversed(self._blocks)), id(root))
            layout = Layout(self._note(root, origins).weights(), origins)
            self._buffer_nbytes = max(self._buffer_nbytes, layout.nbytes)

    @contextlib.contextmanager
    def using(self, root: nn.Module) -> Iterator[None]:
        """Have a block's weights on the device; a context. Calls of one block may overlap.

        Raises:
            torch.OutOfMemoryError: the device is full.
            RuntimeError: a driver failed.
        """
        caller = threading.get_ident()
        with self._locked():
            block = self._enter(root)
            block.calls[caller] += 1
        try:
            if block.calls[caller] == 1:
                with self._locked():
                    self._join()
                    self._look_ahead(id(root), caller)
            yield
        finally:
            with self._locked():
                self._leave(block, caller)

    def release(self) -> None:
        """Free the buffers and unpin all pages; they are taken again when a block is used."""
        with self._locked():
            if not self._is_holding:  # each hook of a model calls this when it is removed
                return
            drain([self.runtime], self._lane)
            for key, block in self._blocks.items():
                self._turns.drop(key)
                block.unpin()
            self._memory = [None] * _BUFFERS
            self._loaded = [None] * _BUFFERS
            while self._lacking:
                self._turns.leave(self._lacking.pop())
            self._is_holding = False

    # With the lock held ---------------------------------------------------------------------------

    def _note(self, root: nn.Module, origins: Sequence[Origin]) -> Block:
        self._blocks[id(root)] = block = Block(root, origins)
        weakref.finalize(root, self._forget, id(root)).atexit = False
        return block

    def _enter(self, root: nn.Module) -> Block:
        self._sweep()
        block = self._blocks.get(id(root)) or self._note(root, ())
        if not block.calls:
            self._bind(id(root), block)
        return block

    def _join(self) -> None:
        try:
            self.runtime.join(self._lane)
        except BaseException:  # the memory is freed now, and no copy may reach it then
            drain([self.runtime], self._lane)
            raise

    def _leave(self, block: Block, caller: int) -> None:
        block.calls[caller] -= 1
        if block.calls[caller]:
            return
        del block.calls[caller]
        if not block.calls:
            self._unbind(block)
        # The next copy into its buffer waits for what this thread has started on the device.
        self.runtime.follow(self._lane)

    def _bind(self, key: int, block: Block) -> None:
        """Put parameters on the device in the place of a block's own."""
        weights = block.weights()
        clean = [origin for origin in self._pinned(block) if origin.is_clean]
        layout = Layout(weights, clean)
        made: dict[int, nn.Parameter] = {}
        try:
            memory = self._bring(key, block, layout) if layout.offsets else None
            for weight in weights:
                tensor = weight.tensor
                if id(tensor) not in made:
                    there = layout.view(memory, tensor) if memory is not None else None
                    if there is None:
                        there = tensor.detach().to(self.runtime.device)
                    made[id(tensor)] = nn.Parameter(there, requires_grad=tensor.requires_grad)
        except BaseException:
            # Copies that have begun end before their memory is freed: it may be in no buffer.
            try:
                drain([self.runtime], self._lane)
            finally:
                self._unbind(block)
            raise
        for weight in weights:
            weight.holder._parameters[weight.name] = made[id(weight.tensor)]
            block.bound.append((weight, made[id(weight.tensor)]))

    def _pinned(self, block: Block) -> list[Origin]:
        """Pin a block's origins; returns those that are pinned."""
        self._is_holding = True
        return [origin for origin in block.origins if origin.pin(self.runtime)]

    def _unbind(self, block: Block) -> None:
        for weight, stand_in in block.bound:
            if weight.holder._parameters.get(weight.name) is stand_in:
                weight.holder._parameters[weight.name] = weight.tensor
        block.bound.clear()
        buffer, block.buffer = block.buffer, None
        if buffer is not None:
            self._turns.leave(buffer)

    def _bring(self, key: int, block: Block, layout: Layout) -> torch.Tensor:
        """Return memory of the device with a block's weights: the copy was started at least."""
        buffer = None if torch.is_grad_enabled() else self._turns.find_or_take(key)
        if buffer is None:  # all are in use, or autograd may keep it
            memory = self._allocate(layout.nbytes)
            self._copy(layout, memory)
            return memory
        memory = self._fill(key, buffer, layout)
        self._turns.enter(buffer)
        block.buffer = buffer
        return memory

    def _look_ahead(self, current: int, caller: int) -> None:
        """Start to copy the block that is likely to follow the current one into a free buffer."""
        key = self._turns.follow(current, caller)
        block = None if key is None else self._blocks.get(key)
        if key is None or not block or torch.is_grad_enabled() or self._turns.find(key) is not None:
            return
        layout = Layout(block.weights(), self._pinned(block))
        buffer = self._turns.take(key) if layout.offsets else None
        if buffer is None:
            return
        try:
            self._fill(key, buffer, layout)
        except torch.OutOfMemoryError:  # the block is copied when it is used
            if self._memory[buffer] is None:
                logger.info("%s has no room for a second buffer", self.runtime.name)
                self._turns.enter(buffer)
                self._lacking.append(buffer)

    def _fill(self, key: int, buffer: int, layout: Layout) -> torch.Tensor:
        """Have a buffer hold a block's weights, unless it does."""
        memory = self._memory[buffer]
        if memory is not None and self._loaded[buffer] == layout:
            return memory
        self._loaded[buffer] = None
        try:
            if memory is None or memory.numel() < layout.nbytes:
                if memory is not None:  # a copy to it may be under way
                    drain([self.runtime], self._lane)
                    self._memory[buffer] = memory = None
                memory = self._allocate(max(layout.nbytes, self._buffer_nbytes))
                self._memory[buffer] = memory
            self._copy(layout, memory)
        except BaseException:
            self._turns.drop(key)
            raise
        self._loaded[buffer] = layout
        return memory

    def _allocate(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):  # such memory may be written to only in this mode
            memory = self.runtime.empty(nbytes)
        self.runtime.follow(self._lane)  # what had this memory before may still be in use
        return memory

    def _copy(self, layout: Layout, memory: torch.Tensor) -> None:
        for offset, source in layout.sources():
            self.runtime.copy(memory[offset : offset + source.numel()], source, self._lane)

    def _sweep(self) -> None:
        """Forget the blocks whose modules are gone."""
        while self._gone:
            key = self._gone.pop()
            block = self._blocks.get(key)
            if block and block.root() is None:
                del self._blocks[key]
                self._turns.forget(key)
                drain([self.runtime], self._lane)
                block.unpin()

    # Without the lock -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; blocks whose modules die meanwhile are forgotten afterwards."""
        try:
            with self._lock:
                yield
        finally:
            self._forget_gone()

    # A module's death ends here, in any thread and with or without the lock.
    def _forget(self, key: int) -> None:
        self._gone.append(key)
        self._forget_gone()

    def _forget_gone(self) -> None:
        # Whoever holds the lock now does it after releasing it.
        while self._gone and self._lock.acquire(blocking=False):
            try:
                self._sweep()
            except RuntimeError as exc:  # the next copy fails in the same way, and there it is seen
                logger.warning("%s: %s", self.runtime.name, exc)
            finally:
                self._lock.release()
