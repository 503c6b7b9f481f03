"""Every device runtime copies in order and registers pages: the tests each one must pass.

A runtime's tests inherit `RuntimeContract` and provide the fixture `runtime`.
"""

import mmap

import pytest
import torch

from shmload._runtimes.runtime import ALIGNMENT_NBYTES


def numbered(nbytes):
    return (torch.arange(nbytes) % 251).to(torch.uint8)


class RuntimeContract:
    """Copies arrive, in the order of their lane, and pages can be registered and released."""

    @pytest.mark.parametrize("nbytes", [1, 255, 256, 1 << 20])
    def test_memory_is_flat_and_aligned(self, runtime, nbytes):
        memory = runtime.empty(nbytes)
        assert memory.dtype == torch.uint8
        assert memory.shape == (nbytes,)
        assert memory.data_ptr() % ALIGNMENT_NBYTES == 0
        assert memory.device.type == runtime.device.type

    def test_what_was_reserved_is_not_held(self, runtime):
        runtime.reserve([])
        runtime.reserve([1 << 20, 3 << 20, 1])
        first, second = runtime.empty(1 << 20), runtime.empty(3 << 20)
        assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        assert second.untyped_storage().nbytes() < 4 << 20

    @pytest.mark.parametrize("nbytes", [1, 4097, 1 << 20])
    def test_copies_are_there_after_their_event(self, runtime, nbytes):
        source, target = numbered(nbytes), runtime.empty(nbytes)
        middle = nbytes // 2
        runtime.copy([(target[:middle], source[:middle])])
        runtime.copy([(target[middle:], source[middle:])])
        runtime.record().synchronize()
        assert torch.equal(target.cpu(), source)

    def test_copies_are_in_order(self, runtime):
        target = runtime.empty(4096)
        runtime.copy([(target, torch.zeros_like(numbered(4096))), (target, numbered(4096))])
        runtime.follow()
        runtime.drain()
        assert torch.equal(target.cpu(), numbered(4096))

    @pytest.mark.parametrize("read_only", [False, True])
    def test_registered_pages_are_copied_from_and_released(self, runtime, read_only):
        pages = torch.frombuffer(mmap.mmap(-1, 1 << 16), dtype=torch.uint8)
        pages.copy_(numbered(1 << 16))
        target = runtime.empty(1 << 16)
        for _ in range(2):  # released pages can be registered again
            is_registered = runtime.register(pages.data_ptr(), 1 << 16, read_only=read_only)
            runtime.copy([(target, pages)])
            runtime.drain()
            assert torch.equal(target.cpu(), pages)
            if is_registered:
                runtime.unregister(pages.data_ptr())

    def test_copies_are_there_for_what_joins_them(self, runtime):
        target = runtime.empty(4096)
        runtime.copy([(target, numbered(4096))])
        runtime.join()
        assert torch.equal(target.clone().cpu(), numbered(4096))

    def test_page_locked_memory_is_of_the_host(self, runtime):
        memory = runtime.page_locked(4096)
        if memory is not None:
            target = runtime.empty(4096)
            runtime.copy([(target, memory.copy_(numbered(4096)))])
            runtime.drain()
            assert memory.device.type == "cpu"
            assert torch.equal(target.cpu(), numbered(4096))
